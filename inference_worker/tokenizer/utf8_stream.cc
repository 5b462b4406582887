#include "common/utf8.h"
#include "inference_worker/tokenizer/bpe_tokenizer.h"

namespace promptcache::worker {

std::string Utf8Stream::Push(std::string_view bytes) {
  pending_.append(bytes);
  std::string out;
  std::string_view rest = pending_;
  while (!rest.empty()) {
    const Utf8Step step = NextUtf8(rest);
    if (step.incomplete) break;
    out.append(step.valid ? rest.substr(0, step.num_bytes)
                          : kReplacementCharacter);
    rest.remove_prefix(step.num_bytes);
  }
  pending_.erase(0, pending_.size() - rest.size());
  return out;
}

std::string Utf8Stream::Finish() {
  std::string out = ReplaceInvalidUtf8(pending_);
  pending_.clear();
  return out;
}

}  // namespace promptcache::worker
