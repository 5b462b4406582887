#pragma once

namespace promptcache::cli {

// The files of this folder, as they are: built into the program, so that it
// needs nothing beside it.
extern const char kDemoSchema[];
extern const char kDemoExactPrompt[];
extern const char kDemoModularPrompt[];

}  // namespace promptcache::cli
