#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "inference_worker/engine/private_pages.h"
#include "inference_worker/serving/generation.h"
#include "inference_worker/serving/module_acquisition.h"
#include "inference_worker/serving/plan_execution.h"
#include "inference_worker/serving/prefix_retention.h"
#include "inference_worker/serving/token_stream.h"

namespace promptcache::worker {

// One request while the scheduler has it.
//
//   kQueued → kAcquiring → kPrefill → kCommitting → kDecode → (kRetaining) →
//                 ↑           ↑            ↓                          kDone
//                 |           └── kWaiting ┘   (modules that others encode)
//                 └── Restart, Preempt: before kDone, back to kQueued
//
// In kAcquiring and kWaiting a task on the executor has `modules`, and the
// scheduler leaves them alone. In kCommitting and kRetaining it has the lease
// and the pages, and changes nothing else.
//
// Restart gives everything back and computes the request again without the
// cache, the tokens that it has generated included; since results do not
// depend on where states come from, the answer goes on as if nothing had been.
// Where the pool is too small for all of its modules the cache is asked once
// more.
// Preempt does the same for the sake of others, with the cache.
//
// Runs on the scheduler's thread, but for what is said above.
class GenerationJob {
 public:
  enum class State {
    kQueued,
    kAcquiring,
    kPrefill,
    kCommitting,
    kWaiting,
    kDecode,
    kRetaining,  // answered; the answer's states are put into the cache
    kDone,
  };

  GenerationJob(GenerationRequest request, std::shared_ptr<GenerationSink> sink,
                std::shared_ptr<CancelFlag> cancel, PrivatePages* pages,
                const Tokenizer* tokenizer, uint32_t context_length,
                std::optional<int32_t> decoder_start);
  ~GenerationJob();
  GenerationJob(const GenerationJob&) = delete;
  GenerationJob& operator=(const GenerationJob&) = delete;

  // FailedPrecondition, with the numbers: it could not run to its end although
  // the whole pool were its own, in the best case (all modules `cached`) or
  // when it must compute all of them here.
  absl::Status CheckPages(bool cached) const;

  // Takes the pages that must be there before the cache is asked: those of the
  // fresh tokens and of what has been generated already; besides those of all
  // modules without the cache, and with it as many as modules took, or lacked,
  // in the attempt before. False when they, and `keep_free` more for others,
  // are not free now: stays kQueued and holds nothing.
  bool Admit(bool with_cache, uint64_t keep_free);
  // Before each stage: takes what `modules` need for it, and gives back what
  // they do not: what Admit took for them before the last stage only. What is
  // read in place, or encoded into the cache or elsewhere, needs none.
  // ResourceExhausted: they are not free now; the caller pauses it, and Admit
  // takes them first. FailedPrecondition: as CheckPages.
  absl::Status TakeModulePages();
  // In kWaiting: gives back what nothing was written to yet, its tail and what
  // it keeps for modules. TakeModulePages takes the tail again.
  void LendPages();
  bool has_idle_pages() const {
    return execution_->num_tail_pages() + spare_pages_.size() > 0;
  }
  uint64_t lent_pages() const { return lent_pages_; }
  // Queues rows for all that can be encoded now and, when nothing is pending,
  // for the fresh parts. The job has rows, or has finished its stage. Fails
  // when a GPU does.
  absl::Status BeginStage();
  // In kDecode: takes the page that the next row is to be written to when it
  // is not there. ResourceExhausted: none is free, nothing has changed.
  absl::Status GrowTail();
  // After each step: what its rows read while it arrived is there and right.
  // Blocks until that is known. False: the step is to be discarded.
  bool ArrivalsVerified();
  // How the token after its last row is chosen where the logits are, valid
  // until the next call; null when the logits are wanted here.
  TokenChoice* NextChoice();
  // The token after its last row: sampled from that row's logits, or what
  // NextChoice came to.
  void Sample(std::span<const float> logits);
  void TakeChosen();
  // Prefill is done and committed: events may flow.
  void StartDecoding();
  // With `retain`, the tail that is to be kept.
  FinishedTail TailToRetain() const;
  // The end of kRetaining.
  void FinishRetained(const RetainedTail& tail);
  // The end of an answer that is complete, while a task still has what is to be
  // kept of it.
  void FinishUnkept(const std::string& notice);
  // Tells the sink. Resources go back now, or when the executor's task is back
  // (Release).
  void Finish(const absl::Status& status);
  void Restart(const std::string& notice);
  // What others get of it.
  enum class Pause {
    kPages,   // they need its pages, and it is the one to wait
    kReader,  // its place, too: its reader is behind
  };
  // REQUIRES: no task has `modules`. What must be computed again is counted
  // here; and by BeginStage what is not in the cache any more.
  void Preempt(Pause pause);
  // Gives lease, reservations and pages back.
  void Release();

  bool wants_cache() const {
    return !private_only_ && !request.full_attention &&
           request.cache_mode != CacheMode::kBypass &&
           !request.prompt->plan->modules.empty();
  }
  // It has waited long enough for what others encode.
  bool waits_no_more() const { return waits_no_more_; }
  bool holds_pages() const { return !held_pages_.empty(); }
  // Its last token was sampled. REQUIRES of Restart and Preempt: not.
  bool answered() const { return tokens_.finished(); }
  // Its reader has heard of it.
  bool started() const { return started_; }
  PlanExecution* execution() { return execution_.get(); }
  Usage CurrentUsage() const;

  const GenerationRequest request;
  const std::shared_ptr<GenerationSink> sink;
  const std::shared_ptr<CancelFlag> cancel;
  State state = State::kQueued;
  bool has_place = false;  // of the queue's; the scheduler's
  uint64_t sequence = 0;   // in order of arrival; the scheduler's
  ModuleSet modules;
  Timings timings;
  absl::Time stage_begin;
  // In kDecode: since when its reader has been behind; the scheduler's.
  absl::Time behind_since = absl::InfiniteFuture();
  // An executor's task holds `modules` although the request is over.
  bool task_running = false;
  // The stage's last row has given its token.
  bool sampled = false;
  // Set by Finish.
  bool succeeded = false;
  Usage usage;
  bool asked_cache = false;  // and was given a lease, in any attempt
  struct Pauses {
    uint32_t count = 0;
    uint64_t recomputed_tokens = 0;  // because of them
  };
  Pauses page_pauses;
  Pauses reader_pauses;
  uint64_t recomputed_tokens() const {
    return page_pauses.recomputed_tokens + reader_pauses.recomputed_tokens;
  }

 private:
  // A module in the host tier that the GPU does not read in place.
  bool ReadsCopy(size_t module) const;
  absl::Status ReadModule(size_t module);
  std::vector<std::byte*> TakePages(uint64_t count);
  // Of what is not used yet, all but `kept`.
  void GiveBackSpare(uint64_t kept);
  uint64_t AllModulePages() const;
  // That the pool could hold it, with `module_pages` besides its tail.
  absl::Status CheckMost(uint64_t module_pages) const;
  // That the modules need which can be read or encoded now and were not yet.
  uint64_t ModulePagesNow() const;
  void MakeExecution();
  void AddToken(TokenEvent event);
  void Emit(TokenEvent event);
  // Once: that the answer begins, and what there is of it.
  void SendStart();
  // The answer is complete.
  void Complete();
  uint32_t CountRetained() const;
  // By this request, as far as it knows: read, or committed.
  bool IsCached(size_t module) const;
  uint64_t TailPagesNow() const;
  void GiveBack();
  // In this attempt; and in all of them.
  StateSource SourceNow(size_t module) const;
  StateSource SourceOf(size_t module) const;
  std::vector<std::string> Notices() const;
  std::vector<SpanReport> Spans() const;
  std::vector<MissReport> Misses() const;

  PrivatePages* const pages_;
  const std::optional<int32_t> decoder_start_;  // of an encoder-decoder
  const uint32_t room_;  // tokens that fit after the plan
  TokenStream tokens_;
  std::optional<TokenChoice> choice_;
  std::unique_ptr<PlanExecution> execution_;
  std::vector<std::byte*> held_pages_;   // all that are ours
  std::vector<std::byte*> spare_pages_;  // of those: not used yet
  // What the modules of the last attempt needed after the cache was asked, at
  // most while any were pending: taken before it is asked again.
  uint64_t reserved_pages_ = 0;
  uint64_t lent_pages_ = 0;
  std::vector<bool> encoded_;
  // Of attempts before this one, that ended in a pause. Where the states came
  // from that they used; kFresh: they used none.
  std::vector<StateSource> earlier_;
  // What they had not to compute, or left in the cache: to compute it now is
  // the pause's doing.
  std::vector<bool> spared_;
  Pauses* last_pauses_ = nullptr;
  // Of pages that are being filled: copies of ours end before pages go back.
  std::vector<std::unique_ptr<Arrival>> arrivals_;
  bool private_only_ = false;
  bool restarted_ = false;
  bool waits_no_more_ = false;
  bool fresh_queued_ = false;
  bool started_ = false;
  uint32_t retained_chunks_ = 0;  // of prompt and tail; 0: not looked at
  std::vector<TokenEvent> unsent_;
  absl::Time decode_begin_;
  std::vector<std::string> notices_;  // of earlier attempts
};

}  // namespace promptcache::worker
