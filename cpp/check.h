// The way from torch to Rust and back: strings there, errors here, and the one check that is made
// before Rust is called.
//
// cxx carries an error as text alone. The bridge puts one letter in front that says its kind, and
// this header turns it into the class that C++ callers can catch by type and that torch maps to
// Python's.
#pragma once

#include "rust/cxx.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace multipack {

// Borrowed, so the text must outlive the call. Throws if it is not UTF-8, see from_rust.
inline rust::Str to_rust(std::string_view text) {
  return rust::Str(text.data(), text.size());
}

// The dtype's name without "torch.", empty for none. A name, because tch has no number for every
// dtype, and an error has to print it anyway.
inline rust::Str to_rust(std::optional<at::ScalarType> dtype) {
  return dtype ? to_rust(c10::getDtypeNames(*dtype).first) : rust::Str();
}

// Throws the error that `text` describes: one letter for the kind, then the message. The text ends
// at the first NUL, so errors print what users wrote escaped.
[[noreturn]] inline void raise(const char* text) {
  const char* const message = text + 1;
  switch (text[0]) {
    case 'V':
      TORCH_CHECK_VALUE(false, message);
    case 'T':
      TORCH_CHECK_TYPE(false, message);
    case 'I':
      TORCH_CHECK_INDEX(false, message);
    default:
      TORCH_CHECK(false, message);
  }
  __builtin_unreachable();
}

// Calls into Rust. Strings belong into `work`: a C++ program may hand over bytes that are not
// UTF-8, and cxx refuses them with an exception of the standard library, where callers expect
// torch's.
template <typename Work>
auto from_rust(Work&& work) {
  try {
    return work();
  } catch (const rust::Error& error) {
    raise(error.what());
  } catch (const std::invalid_argument&) {
    TORCH_CHECK_VALUE(false, "a string argument is not UTF-8");
  }
}

// Throws unless `tensor` is laid out as plain memory. Not left to Rust: a sparse tensor has none
// that tch could be asked for, and torch's own words for it speak of missing kernels.
inline void need_dense(
    const std::string& op, const std::string& argument, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(
      tensor.layout() == at::kStrided,
      op,
      " needs dense tensors, but ",
      argument,
      " has layout ",
      tensor.layout(),
      ": convert it with .to_dense()");
}

} // namespace multipack
