// The part of Scheduler that takes a request from one stage to the next, and
// has the executor do what waits for the daemon.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "inference_worker/serving/scheduler.h"

namespace promptcache::worker {
namespace {

using State = GenerationJob::State;

}  // namespace

void Scheduler::RunBlocking(const Job& job, std::function<void()> task,
                            std::function<void()> then) {
  job->task_running = true;
  executor_->Add([this, job, task = std::move(task), then = std::move(then)] {
    task();
    {
      MutexLock lock(&mu_);
      completions_.push_back([job, then] {
        job->task_running = false;
        if (job->state == State::kDone) {
          job->Release();
        } else {
          then();
        }
      });
    }
    changed_.SignalAll();
  });
}

void Scheduler::StartAcquire(const Job& job) {
  job->state = State::kAcquiring;
  const absl::Time begin = absl::Now();
  // Shared with the task, which fills it.
  auto set = std::make_shared<ModuleSet>();
  RunBlocking(
      job,
      [this, job, set] {
        *set = AcquireModules(client_, job->request, acquisition_,
                              {.leased = job->asked_cache,
                               .waits_no_more = job->waits_no_more()});
        ReplacePolicy(client_, job->request, set.get());
      },
      [this, job, set, begin] {
        job->timings.acquire += absl::Now() - begin;
        corrupt_ += set->corrupt;
        job->asked_cache = job->asked_cache || set->lease != nullptr;
        OnAcquired(job, std::move(*set));
      });
}

void Scheduler::OnAcquired(const Job& job, ModuleSet set) {
  if (job->request.warm && set.lease == nullptr) {
    Fail(job.get(),
         absl::UnavailableError(absl::StrCat(
             "modules cannot be kept: ",
             set.notices.empty() ? "no cache" : set.notices.front())));
    return;
  }
  job->modules = std::move(set);
  Begin(job);
}

void Scheduler::Begin(const Job& job) {
  absl::Status begun = job->TakeModulePages();
  if (absl::IsResourceExhausted(begun)) {
    Preempt(job.get(), GenerationJob::Pause::kPages);
    return;
  }
  if (absl::IsFailedPrecondition(begun)) {
    Fail(job.get(), begun);
    return;
  }
  const uint64_t before = job->recomputed_tokens();
  if (begun.ok()) begun = job->BeginStage();
  recomputed_tokens_ += job->recomputed_tokens() - before;
  if (!begun.ok()) {
    LOG(ERROR) << "a request's pages: " << begun;
    Fail(job.get(), absl::InternalError(absl::StrCat(
                        "the model could not be run: ", begun.message())));
    return;
  }
  if (job->execution()->rows_left() == 0) StageDone(job);
}

void Scheduler::StageDone(const Job& job) {
  job->timings.prefill += absl::Now() - job->stage_begin;
  if (job->modules.HasUncommitted()) {
    StartCommit(job);
  } else if (job->modules.HasPending()) {
    StartWait(job);
  } else {
    StartDecoding(job);
  }
}

void Scheduler::StartDecoding(const Job& job) {
  job->StartDecoding();
  if (job->state == State::kRetaining) StartRetain(job);
}

// The answer has been sent, but for its end.
void Scheduler::StartRetain(const Job& job) {
  if (client_ == nullptr || !options_.no_reuse.empty() ||
      job->request.cache_mode != CacheMode::kReadWrite) {
    job->FinishRetained({.notice = "the answer was not kept: no cache"});
    return;
  }
  auto tail = std::make_shared<RetainedTail>();
  const absl::Time deadline = absl::Now() + options_.commit_timeout;
  RunBlocking(
      job,
      [this, job, tail, deadline, finished = job->TailToRetain()] {
        *tail =
            RetainTail(client_, job->request, acquisition_, finished, deadline);
      },
      [job, tail] { job->FinishRetained(*tail); });
}

void Scheduler::StartCommit(const Job& job) {
  job->state = State::kCommitting;
  auto outcome = std::make_shared<CommitOutcome>();
  const absl::Time deadline =
      std::min(job->request.deadline, absl::Now() + options_.commit_timeout);
  const absl::Duration encode_time = absl::Now() - job->stage_begin;
  RunBlocking(
      job,
      [this, job, outcome, encode_time, deadline] {
        *outcome = CommitModules(job->request, acquisition_, encode_time,
                                 deadline, job->modules);
      },
      [this, job, outcome] {
        job->modules.Take(*outcome);
        // Whose last token is there needs its modules no more: their pages were
        // right when it was computed.
        if (!outcome->all && !job->answered()) {
          RestartJob(job.get(), "computed again");
          return;
        }
        encoded_ += outcome->committed.size();
        if (job->modules.HasPending()) {
          StartWait(job);
          return;
        }
        StartDecoding(job);
      });
}

void Scheduler::StartWait(const Job& job) {
  job->state = State::kWaiting;
  const absl::Time begin = absl::Now();
  const absl::Time deadline =
      std::min(job->request.deadline, begin + options_.pending_timeout);
  const uint32_t corrupt_before = job->modules.corrupt;
  RunBlocking(
      job,
      [this, job, deadline] {
        WaitForPending(job->request, acquisition_, *job->cancel, deadline,
                       &job->modules);
        ReplacePolicy(client_, job->request, &job->modules);
      },
      [this, job, begin, corrupt_before] {
        job->timings.wait_pending += absl::Now() - begin;
        corrupt_ += job->modules.corrupt - corrupt_before;
        Begin(job);
      });
}

}  // namespace promptcache::worker
