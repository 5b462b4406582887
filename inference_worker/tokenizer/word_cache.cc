#include "inference_worker/tokenizer/word_cache.h"

#include "common/strings.h"

namespace promptcache::worker {

bool WordCache::Find(std::string_view word, std::vector<int32_t>* ids) const {
  const auto it = words_.find(ToAbsl(word));
  if (it == words_.end()) return false;
  const int32_t* first = ids_.data() + it->second.first;
  ids->insert(ids->end(), first, first + it->second.count);
  return true;
}

void WordCache::Insert(std::string_view word, const int32_t* ids,
                       size_t num_ids) {
  if (word.size() > kMaxWordBytes) return;
  if (words_.size() >= kMaxWords) {
    words_.clear();
    ids_.clear();
  }
  const Range range = {static_cast<uint32_t>(ids_.size()),
                       static_cast<uint32_t>(num_ids)};
  if (!words_.try_emplace(std::string(word), range).second) return;
  ids_.insert(ids_.end(), ids, ids + num_ids);
}

WordCachePool::Borrowed WordCachePool::Borrow() {
  {
    MutexLock lock(&mu_);
    if (!idle_.empty()) {
      std::unique_ptr<WordCache> cache = std::move(idle_.back());
      idle_.pop_back();
      return Borrowed(this, std::move(cache));
    }
  }
  return Borrowed(this, std::make_unique<WordCache>());
}

void WordCachePool::GiveBack(std::unique_ptr<WordCache> cache) {
  MutexLock lock(&mu_);
  if (idle_.size() < kMaxIdle) idle_.push_back(std::move(cache));
}

}  // namespace promptcache::worker
