//! Compiles the C++ side of the ops: the bridge that cxx generates and the files under `cpp/`.
//!
//! Without the feature `torch` this does nothing, so the core builds on a machine without libtorch.
//! With it, libtorch has been found by torch-sys already, whose build script runs before this one;
//! asking it for the folder is simpler than looking a second time and cannot give a second answer.
//! The rule, for reference: with `LIBTORCH_USE_PYTORCH` set it asks `python` if `VIRTUAL_ENV` is
//! set and `python3` otherwise, else it follows `LIBTORCH`, `LIBTORCH_INCLUDE` and `LIBTORCH_LIB`,
//! else it looks in `/usr`. `make` and `setup.py` set `LIBTORCH`, after libtorch.py has looked which
//! torch it is.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "torch")]
    if let Err(message) = torch::build() {
        eprintln!("{message}");
        std::process::exit(1);
    }
}

#[cfg(feature = "torch")]
mod torch {
    use std::collections::BTreeSet;
    use std::env;
    use std::fs;
    use std::path::{Path, PathBuf};

    const SOURCES: [&str; 8] = [
        "cpp/schemas.cpp",
        "cpp/tensor.cpp",
        "cpp/kernels.cpp",
        "cpp/block_mask.cpp",
        "cpp/attention.cpp",
        "cpp/attention_cpu.cpp",
        "cpp/attention_cuda.cpp",
        "cpp/attention_portable.cpp",
    ];
    const HEADERS: [&str; 5] = [
        "cpp/attention.h",
        "cpp/check.h",
        "cpp/library.h",
        "cpp/tensor.h",
        "cpp/tiles.h",
    ];

    pub fn build() -> Result<(), String> {
        for file in SOURCES.iter().chain(&HEADERS) {
            println!("cargo:rerun-if-changed={file}");
        }
        let lib = PathBuf::from(env::var_os("DEP_TCH_LIBTORCH_LIB").ok_or(
            "torch-sys does not say where libtorch is: the feature torch needs Linux or macOS",
        )?);
        let include = include_dir(&lib)?;

        let mut build = cxx_build::bridge("src/torch/bridge.rs");
        build
            .files(SOURCES)
            // System folders, so that warnings in torch's headers are not ours.
            .flag("-isystem")
            .flag(&include)
            .flag("-isystem")
            .flag(include.join("torch/csrc/api/include"))
            // As torch itself, and as its CMake package asks of programs that include our header.
            .std("c++20")
            .flag_if_supported("-Wall")
            .flag_if_supported("-Wextra")
            // The dispatcher finds the ops through static initialisers that nothing refers to.
            .link_lib_modifier("+whole-archive")
            .file(hidden_symbols()?);
        println!("cargo:rerun-if-env-changed=LIBTORCH_CXX11_ABI");
        if let Ok(abi) = env::var("LIBTORCH_CXX11_ABI") {
            build.define("_GLIBCXX_USE_CXX11_ABI", abi.as_str());
        }
        build.compile("multipack_cpp");

        println!("cargo:rustc-link-search=native={}", lib.display());
        // These two and no more: a program that links only them can load the library as well.
        println!("cargo:rustc-link-lib=dylib=torch_cpu");
        println!("cargo:rustc-link-lib=dylib=c10");
        // Installed, the library lies in site-packages/multipack/lib, beside
        // site-packages/torch/lib. The absolute folder is for test and bench binaries and for
        // uninstalled copies; setup.py cuts it from the wheel's copy.
        println!("cargo:rustc-link-arg-cdylib=-Wl,-rpath,$ORIGIN/../../torch/lib");
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.display());
        // Cargo exports what any crate exports under a C name. A program may load several libraries
        // that were made with cxx, and must not take the functions of one for those of another.
        println!("cargo:rustc-link-arg-cdylib=-Wl,--exclude-libs,ALL");
        Ok(())
    }

    /// An assembly file that hides the functions of the bridge, which are for our C++ side alone.
    ///
    /// They are in no archive, where `--exclude-libs` would hide them; but a symbol is exported only
    /// if no object file calls it hidden.
    fn hidden_symbols() -> Result<PathBuf, String> {
        let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
        let bridge = out.join("cxxbridge/sources/multipack/src/torch/bridge.rs.cc");
        let code = fs::read_to_string(&bridge)
            .map_err(|error| format!("cxx wrote no {}: {error}", bridge.display()))?;
        let symbols: BTreeSet<&str> = code
            .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '$'))
            .filter(|word| word.starts_with("multipack$ffi$"))
            .collect();
        let list: String = symbols
            .iter()
            .map(|name| format!(".hidden {name}\n"))
            .collect();
        let file = out.join("hidden.s");
        fs::write(&file, list).map_err(|error| format!("{}: {error}", file.display()))?;
        Ok(file)
    }

    /// The folder of libtorch's headers that belongs to the library folder `lib`.
    fn include_dir(lib: &Path) -> Result<PathBuf, String> {
        for name in [
            "LIBTORCH_USE_PYTORCH",
            "LIBTORCH",
            "LIBTORCH_INCLUDE",
            "LIBTORCH_LIB",
        ] {
            println!("cargo:rerun-if-env-changed={name}");
        }
        let chosen = match env::var_os("LIBTORCH_USE_PYTORCH") {
            Some(_) => None,
            None => env::var_os("LIBTORCH_INCLUDE").or_else(|| env::var_os("LIBTORCH")),
        };
        let root = chosen.map_or_else(|| lib.join(".."), PathBuf::from);
        let include = root.join("include");
        if include.join("ATen/core/Tensor.h").exists() {
            Ok(include)
        } else {
            Err(format!(
                "no libtorch headers in {}: install torch with pip and run 'python libtorch.py \
                 cargo …', or set LIBTORCH to an unpacked libtorch",
                include.display()
            ))
        }
    }
}
