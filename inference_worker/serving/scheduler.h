#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/mutex.h"
#include "common/tokenizer.h"
#include "inference_worker/cache/cache_client.h"
#include "inference_worker/engine/backend.h"
#include "inference_worker/engine/private_pages.h"
#include "inference_worker/serving/executor.h"
#include "inference_worker/serving/generation.h"
#include "inference_worker/serving/generation_job.h"
#include "inference_worker/serving/module_acquisition.h"

namespace promptcache::worker {

// What has happened since the start; for logs, metrics and tests.
struct SchedulerStats {
  uint64_t steps = 0;
  uint64_t rows = 0;
  uint64_t requests_done = 0;
  uint64_t requests_failed = 0;  // cancelled and late ones included
  uint64_t restarts = 0;
  uint64_t discarded_steps = 0;  // a view was not what it had been
  uint64_t corrupt_pages = 0;
  uint64_t modules_encoded = 0;    // committed
  uint64_t preemptions = 0;        // for want of private pages
  uint64_t reader_pauses = 0;      // because a reader was behind
  uint64_t recomputed_tokens = 0;  // because of either
  AttentionReads attention;        // of all passes
};

// Runs requests on one model, an iteration at a time: each step is one pass
// over one row of every request that decodes and chunks of those that prefill,
// shared out evenly up to `step_tokens` rows. Deadlines, cancellation and new
// requests are looked at between steps. Places and rows are shared evenly
// between isolation domains first (fair_share.h).
//
// One thread of its own calls the backend and every sink; what waits for the
// cache daemon runs on an executor with a thread for every request that runs or
// waits, so that none of them waits for another's.
//
// Whatever goes wrong with the cache is answered by computing the same plan
// privately. Before and after each step the leases that it read under are
// checked: on a mismatch what that request got from the step is discarded and
// the request is computed again without the cache.
//
// A request is admitted when its prompt's pages are free and leave some for
// those that run; tails then grow page by page. When none is free the youngest
// request gives its pages back and waits in the queue, by its age, to be
// computed again (GenerationJob::Preempt): its reader sees a pause. So does one
// whose modules turn out to need pages that are not free. Who could not have
// its pages although all its modules were cached is refused; who cannot have
// them because some are not ends there. So the last one running has enough, as
// soon as those are back whose task is with the executor. Who waits for modules
// that others encode is not waited for: it lends its pages to older ones, loses
// nothing by it, and is paused only if they are not free when it has waited.
//
// A request whose reader is behind is not computed on. After a while it gives
// its place, its pages and its lease to whoever waits for one of them, after a
// long while to nobody, and waits itself until its reader has caught up. As
// long as there are not more such requests than the queue has places they take
// none of these.
//
// Thread-safe. The destructor ends what is running with Cancelled.
class Scheduler {
 public:
  struct Options {
    uint32_t step_tokens = 256;
    // Besides, as many may wait for modules that others encode, and go on at
    // once when these are there: up to twice as many are then computed.
    uint32_t max_running = 16;
    // These and max_running are the queue's places.
    uint32_t max_queue = 64;
    // A cap on the model's own context; 0: none.
    uint32_t context_length = 0;
    VerifyMode verify = VerifyMode::kSample;
    // Why states must be neither read nor kept (ReuseRule, the self-check): in
    // the notices of every request that has modules. "": they may be.
    std::string no_reuse;
    // How long a request waits for modules that others encode.
    absl::Duration pending_timeout = absl::Seconds(30);
    absl::Duration commit_timeout = absl::Seconds(5);
    // So long before its deadline a complete answer is told, whatever is still
    // being kept of it: it must get there.
    absl::Duration reply_time = absl::Milliseconds(100);
    // How long a reader may be behind while others wait for its place or pages.
    absl::Duration reader_patience = absl::Milliseconds(500);
    // How long at all: what its lease holds in memory is the whole node's.
    absl::Duration reader_limit = absl::Seconds(30);
    absl::Status Validate() const;
  };

  // `client` may be null: no cache. None may be outlived.
  static absl::StatusOr<std::unique_ptr<Scheduler>> Create(
      const Options& options, Backend* backend, PrivatePages* pages,
      const Tokenizer* tokenizer, CacheClient* client);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Queues the request; its sink hears of everything that follows.
  // InvalidArgument for links with an encoder-decoder; ResourceExhausted when
  // the queue is full for its domain; FailedPrecondition when the request could
  // never have its pages, however much of it is cached; Unavailable when
  // draining. Then the sink hears nothing.
  absl::StatusOr<std::shared_ptr<CancelFlag>> Submit(
      GenerationRequest request, std::shared_ptr<GenerationSink> sink)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Something outside has changed: a flag, or a sink that is ready again.
  void Wake() ABSL_LOCKS_EXCLUDED(mu_);
  // Refuses new requests and returns when all are done, or at the deadline
  // (false) with the rest cancelled.
  bool Drain(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mu_);

  SchedulerStats stats() const;
  uint32_t num_requests() const ABSL_LOCKS_EXCLUDED(mu_);
  // The most that there ever are, of all domains together, those included that
  // wait for their readers.
  uint32_t max_requests() const;

 private:
  using Job = std::shared_ptr<GenerationJob>;
  // A job's part of a step.
  struct Share {
    GenerationJob* job = nullptr;
    size_t first_group = 0;
    size_t num_groups = 0;
    size_t rows = 0;
    size_t logit_rows = 0;  // whose logits come back
    bool chosen = false;    // its token is chosen by the backend
  };

  Scheduler(const Options& options, Backend* backend, PrivatePages* pages,
            const Tokenizer* tokenizer, CacheClient* client);

  uint32_t num_places() const {
    return options_.max_queue + options_.max_running;
  }
  void TakePlace(GenerationJob* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void GivePlaceBack(GenerationJob* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Run();
  // False when it is time to end.
  bool WaitForWork(bool runnable);
  void ReportUse(const GenerationJob& job);
  void EndDoneJobs();
  // When CheckDeadlines has to do with it.
  absl::Time DueTime(const GenerationJob& job) const;
  void CheckDeadlines();
  void NoteReaders();
  void AdmitQueued();
  // For one more to run.
  // Those that must end, or make way, for one more to be admitted.
  size_t MissingSlots() const;
  // That one more must leave free.
  uint64_t PagesAhead() const;
  bool AsksCache(const GenerationJob& job) const;
  // The end: nobody that could get on.
  std::deque<Job>::iterator NextQueued();
  void StartAcquire(const Job& job);
  void OnAcquired(const Job& job, ModuleSet set);
  void StageDone(const Job& job);
  void StartCommit(const Job& job);
  void StartWait(const Job& job);
  void StartDecoding(const Job& job);
  void StartRetain(const Job& job);
  // Begins a stage; its rows are run, or it is done at once, or its pages are
  // not free and the request waits for its turn to have them.
  void Begin(const Job& job);
  void RestartJob(GenerationJob* job, const std::string& notice);
  void Preempt(GenerationJob* job, GenerationJob::Pause pause);
  // Of a request whose reader has been behind for so long. False: there is
  // none.
  bool TakeFromSlowReader(absl::Duration patience);
  bool ReaderIsBehind(const GenerationJob& job, absl::Duration patience) const;
  // False, and nobody is paused: there are not so many.
  bool TakeFromSlowReaders(size_t count, absl::Duration patience);
  // From running_ back to the queue, where it stood when it came.
  void Requeue(GenerationJob* job);
  // Runs `task` on the executor and `then` on the scheduler's thread.
  void RunBlocking(const Job& job, std::function<void()> task,
                   std::function<void()> then);

  std::vector<Share> PlanStep(std::vector<RowGroup>* groups);
  void RestartLost();
  // Gives every request that decodes the page it needs, the oldest first.
  void GrowTails();
  void GrowTail(GenerationJob* job);
  // For want of pages; in kWaiting, of those that are idle. Null: nobody but
  // the one who asks.
  GenerationJob* NextVictim();
  // Of those that may be paused; by turns as fair_share.h says.
  GenerationJob* ToPause(
      const std::function<bool(const GenerationJob&)>& may_wait);
  void SharePrefill(std::vector<GenerationJob*> prefills, size_t budget,
                    std::vector<RowGroup>* groups, std::vector<Share>* shares);
  void AddShare(GenerationJob* job, size_t max_rows,
                std::vector<RowGroup>* groups, std::vector<Share>* shares);
  bool Step();
  absl::Status Forward(std::span<const RowGroup> groups);
  void FinishShare(const Share& share, std::span<const float> logits);
  // The pass failed as a whole: each request alone, so that one that cannot be
  // computed fails by itself.
  void StepOneByOne(const std::vector<Share>& shares,
                    const std::vector<RowGroup>& groups);
  Job SharedJob(const GenerationJob* job) const;
  void Fail(GenerationJob* job, const absl::Status& status);

  const Options options_;
  Backend* const backend_;
  PrivatePages* const pages_;
  const Tokenizer* const tokenizer_;
  CacheClient* const client_;
  const AcquisitionOptions acquisition_;
  const uint32_t context_length_;

  mutable Mutex mu_;
  CondVar changed_;
  bool woken_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  uint32_t num_requests_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t next_sequence_ ABSL_GUARDED_BY(mu_) = 0;
  // Of those that have one; and by isolation domain, without zeros.
  uint32_t places_taken_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::string, uint32_t> places_of_ ABSL_GUARDED_BY(mu_);
  std::deque<Job> arrivals_ ABSL_GUARDED_BY(mu_);
  std::deque<std::function<void()>> completions_ ABSL_GUARDED_BY(mu_);

  // The scheduler's thread only.
  std::deque<Job> queue_;
  std::vector<Job> running_;
  size_t turn_ = 0;  // whose turn it is to get what an even share leaves over
  bool requeued_ = false;  // a job went back to the queue in this step
  std::vector<float> logits_;
  AttentionReads reported_reads_;  // of those below

  std::atomic<uint64_t> steps_{0};
  std::atomic<uint64_t> rows_{0};
  std::atomic<uint64_t> done_{0};
  std::atomic<uint64_t> failed_{0};
  std::atomic<uint64_t> restarts_{0};
  std::atomic<uint64_t> discarded_{0};
  std::atomic<uint64_t> corrupt_{0};
  std::atomic<uint64_t> encoded_{0};
  std::atomic<uint64_t> preemptions_{0};
  std::atomic<uint64_t> reader_pauses_{0};
  std::atomic<uint64_t> recomputed_tokens_{0};
  std::atomic<uint64_t> needed_tokens_{0};
  std::atomic<uint64_t> read_tokens_{0};

  std::unique_ptr<Executor> executor_;
  std::thread thread_;
};

}  // namespace promptcache::worker
