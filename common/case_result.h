#pragma once

#include <string>

namespace promptcache {

// What became of one case of a file of vectors.
struct CaseResult {
  std::string name;        // for people: the file's own, or its line
  std::string difference;  // the first one found; empty: the case passed
};

}  // namespace promptcache
