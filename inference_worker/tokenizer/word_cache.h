#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "common/mutex.h"

namespace promptcache::worker {

// Ids of words that were merged before: a bounded number of short words; when
// it is full it is emptied, and fills again with the words now in use.
// Thread-compatible.
class WordCache {
 public:
  // Longer words are rare and would make the cache's size depend on the text.
  static constexpr size_t kMaxWordBytes = 48;

  WordCache() = default;
  WordCache(const WordCache&) = delete;
  WordCache& operator=(const WordCache&) = delete;

  // Appends the word's ids; false when it is not there.
  bool Find(std::string_view word, std::vector<int32_t>* ids) const;
  void Insert(std::string_view word, const int32_t* ids, size_t num_ids);

 private:
  static constexpr size_t kMaxWords = 16384;

  struct Range {
    uint32_t first;
    uint32_t count;
  };

  absl::flat_hash_map<std::string, Range> words_;
  std::vector<int32_t> ids_;  // of all words; ranges of it
};

// Caches for as many callers as there are at a time, each with one of its own:
// a lock a word would cost as much as merging it (Debian's absl::Mutex, with
// its deadlock detection on, 48 ns). Thread-safe.
class WordCachePool {
 public:
  // Gives the cache back when it goes. Must not outlive the pool.
  class Borrowed {
   public:
    ~Borrowed() { pool_->GiveBack(std::move(cache_)); }
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    WordCache& operator*() const { return *cache_; }

   private:
    friend class WordCachePool;
    Borrowed(WordCachePool* pool, std::unique_ptr<WordCache> cache)
        : pool_(pool), cache_(std::move(cache)) {}

    WordCachePool* const pool_;
    std::unique_ptr<WordCache> cache_;
  };

  WordCachePool() = default;
  WordCachePool(const WordCachePool&) = delete;
  WordCachePool& operator=(const WordCachePool&) = delete;

  Borrowed Borrow() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // What is kept when nobody encodes; about 1.5 MB each when full.
  static constexpr size_t kMaxIdle = 8;

  void GiveBack(std::unique_ptr<WordCache> cache) ABSL_LOCKS_EXCLUDED(mu_);

  Mutex mu_;
  std::vector<std::unique_ptr<WordCache>> idle_ ABSL_GUARDED_BY(mu_);
};

}  // namespace promptcache::worker
