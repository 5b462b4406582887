#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "common/mutex.h"

namespace promptcache::worker {

// Ids of words that were merged before. Holds a bounded number of short words:
// a full shard is emptied and fills again with the words now in use.
// Thread-safe.
class WordCache {
 public:
  // Longer words are rare and would make the cache's size depend on the text.
  static constexpr size_t kMaxWordBytes = 48;

  WordCache() = default;
  WordCache(const WordCache&) = delete;
  WordCache& operator=(const WordCache&) = delete;

  // Appends the word's ids; false when it is not there.
  bool Find(std::string_view word, std::vector<int32_t>* ids);
  void Insert(std::string_view word, const int32_t* ids, size_t num_ids);

 private:
  static constexpr size_t kShards = 16;
  static constexpr size_t kMaxWordsPerShard = 4096;

  struct Shard {
    Mutex mu;
    absl::flat_hash_map<std::string, std::vector<int32_t>> words
        ABSL_GUARDED_BY(mu);
  };

  Shard& ShardOf(std::string_view word);

  std::array<Shard, kShards> shards_;
};

}  // namespace promptcache::worker
