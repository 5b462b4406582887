#pragma once

#include <string>
#include <vector>

namespace promptcache::cli {

// The formats of vectors that there are (tests/data), told apart by fields.
enum class VectorKind {
  kNone,           // not a file of vectors
  kDamaged,        // meant to be JSON, and is not
  kConversations,  // messages, and how chat templates render them
  kPml,            // schema, prompt, expected plan
  kTokenizer,      // text and ids, one object a line
  kLogits,         // ids and what a model makes of them
  kFolderLogits,   // the same beside a model's folder: `inputs`, `argmax`, ...
};

// One case of a file, as a file of its own: so that a checker that refuses the
// whole file because of one case can be asked about the others.
struct VectorPart {
  std::string name;
  std::string text;
};

struct VectorFile {
  VectorKind kind = VectorKind::kNone;
  std::string problem;   // kDamaged: what is wrong
  bool has_ids = false;  // kConversations: a vocabulary is needed
  std::vector<VectorPart> parts;
};

// `path` decides between one JSON document and one a line.
VectorFile ParseVectorFile(const std::string& path, const std::string& text);

}  // namespace promptcache::cli
