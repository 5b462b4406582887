#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/kv_layout.h"
#include "common/mutex.h"
#include "inference_worker/cache/cache_client.h"
#include "inference_worker/cache/session_client.h"
#include "promptcache/node/v1/node.pb.h"

namespace promptcache::worker {

// CacheLease over one session. Thread-compatible but for Valid, Progress and
// ReportCorruption, which may be called from several threads at once while
// nothing else is.
//
// Holds its session, and through it the mappings: views that were built from
// it never fault, whatever became of the daemon.
class LeaseClient final : public CacheLease {
 public:
  // Asks, and turns the answer into addresses.
  static absl::StatusOr<std::unique_ptr<CacheLease>> Acquire(
      std::shared_ptr<SessionClient> session, const KvLayout& layout,
      const CacheClient::AcquireArgs& args, absl::Time deadline);
  ~LeaseClient() override;
  LeaseClient(const LeaseClient&) = delete;
  LeaseClient& operator=(const LeaseClient&) = delete;

  const std::vector<AcquiredModule>& modules() const override {
    return modules_;
  }
  absl::Status WaitPending(size_t index, absl::Time deadline) override;
  absl::StatusOr<std::vector<bool>> Commit(
      const std::vector<CommitModule>& modules, absl::Time deadline) override;
  void Abort(const std::vector<uint64_t>& reservation_ids) override;
  bool Valid(size_t index) const override;
  ModuleProgress Progress(size_t index) const override;
  void ReportCorruption(size_t index) override;

 private:
  LeaseClient(std::shared_ptr<SessionClient> session, const KvLayout& layout,
              const CacheClient::AcquireArgs& args);
  // Takes over what the daemon granted for keys [first, first + n) of the
  // reply. An answer that makes no sense breaks the session.
  absl::Status Take(const node::v1::AcquireReply& reply, size_t first,
                    size_t num_keys);

  struct Key {
    ModuleKey key;
    uint64_t num_pages = 0;
  };

  const std::shared_ptr<SessionClient> session_;
  const uint64_t request_id_;
  const bool want_page_sums_;
  std::vector<Key> keys_;
  std::vector<AcquiredModule> modules_;
  // Words of the generation array, one per page, of all modules one after
  // another as they were granted; and, parallel to modules_, which are whose.
  struct Range {
    size_t begin = 0;
    size_t count = 0;  // 0: the module cannot be read
  };
  std::vector<const uint64_t*> generation_words_;
  std::vector<Range> generations_;
  // Parallel: progress words, null unless arriving.
  std::vector<const uint64_t*> progress_;
  std::map<uint64_t, size_t> open_reservations_;  // indices into modules_
  std::vector<uint64_t> lease_ids_;
};

}  // namespace promptcache::worker
