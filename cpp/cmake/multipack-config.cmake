# find_package(multipack) gives the target multipack::multipack: header, library and torch.
#
#   cmake -DCMAKE_PREFIX_PATH="$(python -c 'import multipack, torch;
#     print(multipack.cmake_prefix_path, torch.utils.cmake_prefix_path, sep=";")')" …
include(CMakeFindDependencyMacro)

# The torch of PyPI is made for CUDA, and its CMake files want the CUDA toolkit's targets even where
# no program uses them. Without the toolkit, empty ones will do.
find_package(CUDAToolkit QUIET)
if(NOT CUDAToolkit_FOUND)
  foreach(target torch::cudart torch::nvtoolsext)
    if(NOT TARGET ${target})
      add_library(${target} INTERFACE IMPORTED)
    endif()
  endforeach()
endif()
find_dependency(Torch)

get_filename_component(_multipack "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

# The library is compiled against the C++ classes of one minor version; with another it fails at the
# link or, worse, later. Its build recorded which.
if(EXISTS "${_multipack}/lib/libmultipack.json")
  file(READ "${_multipack}/lib/libmultipack.json" _multipack_record)
  string(JSON _multipack_torch GET "${_multipack_record}" torch)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" _multipack_minor "${_multipack_torch}")
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" _multipack_found "${Torch_VERSION}")
  if(NOT _multipack_minor STREQUAL _multipack_found)
    set(multipack_FOUND FALSE)
    string(CONCAT multipack_NOT_FOUND_MESSAGE
      "multipack was built for torch ${_multipack_torch}, but CMake found torch ${Torch_VERSION}: "
      "name torch ${_multipack_minor} in CMAKE_PREFIX_PATH, or build multipack for this one")
    return()
  endif()
endif()

if(NOT TARGET multipack::multipack)
  add_library(multipack::multipack SHARED IMPORTED)
  set_target_properties(multipack::multipack PROPERTIES
    IMPORTED_LOCATION "${_multipack}/lib/libmultipack.so"
    IMPORTED_NO_SONAME TRUE
    INTERFACE_INCLUDE_DIRECTORIES "${_multipack}/include;${TORCH_INCLUDE_DIRS}"
    INTERFACE_COMPILE_FEATURES cxx_std_20
    INTERFACE_LINK_LIBRARIES "${TORCH_LIBRARIES}")
endif()
unset(_multipack)
