#include "inference_worker/tokenizer/word_cache.h"

#include <functional>

#include "common/strings.h"

namespace promptcache::worker {

WordCache::Shard& WordCache::ShardOf(std::string_view word) {
  // Not the map's own hash: all words of a shard would share bits of it.
  return shards_[std::hash<std::string_view>()(word) % kShards];
}

bool WordCache::Find(std::string_view word, std::vector<int32_t>* ids) {
  Shard& shard = ShardOf(word);
  MutexLock lock(&shard.mu);
  const auto it = shard.words.find(ToAbsl(word));
  if (it == shard.words.end()) return false;
  ids->insert(ids->end(), it->second.begin(), it->second.end());
  return true;
}

void WordCache::Insert(std::string_view word, const int32_t* ids,
                       size_t num_ids) {
  if (word.size() > kMaxWordBytes) return;
  Shard& shard = ShardOf(word);
  MutexLock lock(&shard.mu);
  if (shard.words.size() >= kMaxWordsPerShard) shard.words.clear();
  shard.words.try_emplace(std::string(word), ids, ids + num_ids);
}

}  // namespace promptcache::worker
