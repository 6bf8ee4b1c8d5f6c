// Registration that tolerates a second copy of the library in one process.
//
// A program may load the library twice under two paths: from the wheel and from a build folder, or
// because a model file brings its own copy. Torch would define every op twice and throw inside a
// static initialiser, where nothing can catch it. So each registration block asks first whether
// another copy was here before; the first one keeps the ops.
#pragma once

#include <torch/library.h>

namespace multipack {

// Whether the ops belong to this copy of the library. The first block that asks decides, and no
// block defines or implements anything before it has asked.
bool is_first_copy();

} // namespace multipack
