// Errors on their way from Rust to torch's exception classes.
//
// cxx carries an error as text alone. The bridge puts one letter in front that says its kind, and
// this header turns it into the class that C++ callers can catch by type and that torch maps to
// Python's.
#pragma once

#include "rust/cxx.h"

#include <c10/util/Exception.h>

namespace multipack {

// Throws the error that `text` describes: one letter for the kind, then the message.
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

// Calls into Rust.
template <typename Work>
auto from_rust(Work&& work) {
  try {
    return work();
  } catch (const rust::Error& error) {
    raise(error.what());
  }
}

} // namespace multipack
