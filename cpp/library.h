// Registration that tolerates a second copy of the library in one process, and another torch.
//
// A program may load the library twice under two paths: from the wheel and from a build folder, or
// because a model file brings its own copy. Torch would define every op twice and throw inside a
// static initialiser, where nothing can catch it. And a program may load it beside a torch that it
// was not compiled against: some of those load it without complaint and then misread its tensors.
// So each registration block asks first.
#pragma once

#include <torch/library.h>

namespace multipack {

// Whether the ops belong to this copy of the library: no other copy was here before, and torch is
// the one of its headers; if not, that is said on stderr. The first block that asks decides, and no
// block defines or implements anything before it has asked.
bool owns_ops();

} // namespace multipack
