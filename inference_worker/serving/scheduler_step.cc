// The part of Scheduler that makes passes.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "inference_worker/serving/fair_share.h"
#include "inference_worker/serving/scheduler.h"

namespace promptcache::worker {
namespace {

using State = GenerationJob::State;

constexpr char kStateLost[] =
    "cached states were lost while they were read: recomputed";

bool OlderThan(const GenerationJob* a, const GenerationJob* b) {
  return a->sequence < b->sequence;
}

}  // namespace

void Scheduler::AddShare(GenerationJob* job, size_t max_rows,
                         std::vector<RowGroup>* groups,
                         std::vector<Share>* shares) {
  Share share;
  share.job = job;
  share.first_group = groups->size();
  share.rows = job->execution()->NextRows(max_rows, groups);
  share.num_groups = groups->size() - share.first_group;
  for (size_t g = share.first_group; g < groups->size(); ++g) {
    RowGroup& group = (*groups)[g];
    if (group.logits != LogitsWanted::kLast) continue;
    if (backend_->chooses_tokens()) group.choice = job->NextChoice();
    if (group.choice != nullptr) {
      share.chosen = true;
    } else {
      ++share.logit_rows;
    }
  }
  shares->push_back(share);
}

void Scheduler::SharePrefill(std::vector<GenerationJob*> prefills,
                             size_t budget, std::vector<RowGroup>* groups,
                             std::vector<Share>* shares) {
  std::sort(prefills.begin(), prefills.end(),
            [](GenerationJob* a, GenerationJob* b) {
              return a->execution()->rows_left() < b->execution()->rows_left();
            });
  std::vector<RowsWanted> wanted;
  wanted.reserve(prefills.size());
  for (GenerationJob* job : prefills) {
    wanted.push_back(
        {job->request.isolation_domain, job->execution()->rows_left()});
  }
  const std::vector<size_t> given = ShareRows(budget, wanted, turn_);
  for (size_t i = 0; i < prefills.size() && budget > 0; ++i) {
    if (given[i] == 0) continue;
    // More than was given when it is an encoder's segment.
    AddShare(prefills[i], given[i], groups, shares);
    budget -= std::min(budget, shares->back().rows);
  }
}

void Scheduler::RestartLost() {
  // A copy: who is restarted goes from running_ to the queue.
  const std::vector<Job> jobs = running_;
  for (const Job& job : jobs) {
    if (job->state != State::kPrefill && job->state != State::kDecode) continue;
    if (!job->modules.Valid()) RestartJob(job.get(), kStateLost);
  }
}

GenerationJob* Scheduler::ToPause(
    const std::function<bool(const GenerationJob&)>& may_wait) {
  std::vector<GenerationJob*> jobs;
  jobs.reserve(running_.size());
  for (const Job& job : running_) jobs.push_back(job.get());
  std::sort(jobs.begin(), jobs.end(), OlderThan);
  std::vector<RunningRequest> running;
  running.reserve(jobs.size());
  for (const GenerationJob* job : jobs) {
    running.push_back({job->request.isolation_domain, may_wait(*job)});
  }
  const auto next = NextToPreempt(running);
  return next.has_value() ? jobs[*next] : nullptr;
}

GenerationJob* Scheduler::NextVictim() {
  size_t candidates = 0;
  GenerationJob* const next = ToPause([&](const GenerationJob& job) {
    if (job.state == State::kWaiting) return job.has_idle_pages();
    // What others hold belongs to the executor's task for now.
    const bool ours =
        job.state == State::kPrefill || job.state == State::kDecode;
    if (!ours || !job.holds_pages()) return false;
    ++candidates;
    return true;
  });
  const bool idle = next != nullptr && next->state == State::kWaiting;
  return candidates < 2 && !idle ? nullptr : next;
}

bool Scheduler::ReaderIsBehind(const GenerationJob& job,
                               absl::Duration patience) const {
  // As of the step's beginning; it may have caught up since.
  return job.state == State::kDecode &&
         job.behind_since <= absl::Now() - patience && !job.sink->Ready();
}

bool Scheduler::TakeFromSlowReaders(size_t count, absl::Duration patience) {
  const auto slow = std::count_if(
      running_.begin(), running_.end(),
      [&](const Job& job) { return ReaderIsBehind(*job, patience); });
  if (static_cast<size_t>(slow) < count) return false;
  while (count > 0 && TakeFromSlowReader(patience)) --count;
  return count == 0;
}

bool Scheduler::TakeFromSlowReader(absl::Duration patience) {
  GenerationJob* const job = ToPause(
      [&](const GenerationJob& j) { return ReaderIsBehind(j, patience); });
  if (job == nullptr) return false;
  Preempt(job, GenerationJob::Pause::kReader);
  return true;
}

void Scheduler::GrowTail(GenerationJob* job) {
  while (job->state == State::kDecode) {  // it may be its own victim
    const absl::Status grown = job->GrowTail();
    if (grown.ok()) return;
    if (!absl::IsResourceExhausted(grown)) {
      LOG(ERROR) << "a request's pages: " << grown;
      Fail(job, absl::InternalError(absl::StrCat("the model could not be run: ",
                                                 grown.message())));
      return;
    }
    if (TakeFromSlowReader(options_.reader_patience)) continue;
    GenerationJob* victim = NextVictim();
    if (victim == nullptr) return;  // until the executor's tasks are back
    if (victim->state == State::kWaiting) {
      victim->LendPages();
    } else {
      Preempt(victim, GenerationJob::Pause::kPages);
    }
  }
}

void Scheduler::GrowTails() {
  std::vector<GenerationJob*> growing;
  for (const Job& job : running_) {
    if (job->state == State::kDecode && job->sink->Ready() &&
        job->execution()->missing_tail_pages() > 0) {
      growing.push_back(job.get());
    }
  }
  std::sort(growing.begin(), growing.end(), OlderThan);
  for (GenerationJob* job : growing) GrowTail(job);
}

std::vector<Scheduler::Share> Scheduler::PlanStep(
    std::vector<RowGroup>* groups) {
  RestartLost();
  GrowTails();
  std::vector<Share> shares;
  std::vector<GenerationJob*> prefills;
  size_t budget = options_.step_tokens;
  for (size_t i = 0; i < running_.size(); ++i) {
    GenerationJob* job = running_[(turn_ + i) % running_.size()].get();
    if (job->state == State::kPrefill) {
      prefills.push_back(job);
    } else if (job->state == State::kDecode && job->sink->Ready() &&
               job->execution()->missing_tail_pages() == 0 && budget > 1) {
      // A row is left for those that prefill: when many have come back from
      // waiting at a time there may be more that decode than rows.
      AddShare(job, 1, groups, &shares);
      --budget;
    }
  }
  SharePrefill(std::move(prefills), budget, groups, &shares);
  ++turn_;
  return shares;
}

absl::Status Scheduler::Forward(std::span<const RowGroup> groups) {
  const absl::Status status = backend_->Forward(groups, &logits_);
  const AttentionReads reads = backend_->attention_reads();
  needed_tokens_ += reads.needed_tokens;
  read_tokens_ += reads.read_tokens;
  return status;
}

bool Scheduler::Step() {
  std::vector<RowGroup> groups;
  requeued_ = false;
  const std::vector<Share> shares = PlanStep(&groups);
  if (shares.empty()) return requeued_;
  const absl::Status status = Forward(groups);
  ++steps_;
  if (!status.ok()) {
    StepOneByOne(shares, groups);
    return true;
  }
  size_t row = 0;
  for (const Share& share : shares) {
    FinishShare(share, std::span<const float>(logits_).subspan(
                           row * backend_->vocab_size(),
                           share.logit_rows * backend_->vocab_size()));
    row += share.logit_rows;
  }
  return true;
}

void Scheduler::StepOneByOne(const std::vector<Share>& shares,
                             const std::vector<RowGroup>& groups) {
  for (const Share& share : shares) {
    const absl::Status status =
        Forward(std::span<const RowGroup>(groups).subspan(share.first_group,
                                                          share.num_groups));
    if (status.ok()) {
      FinishShare(share, logits_);
      continue;
    }
    LOG(ERROR) << "a pass failed: " << status;
    Fail(share.job, absl::InternalError(absl::StrCat(
                        "the model could not be run: ", status.message())));
  }
}

void Scheduler::FinishShare(const Share& share, std::span<const float> logits) {
  GenerationJob* job = share.job;
  // In this order: what has not arrived right has lost its generation by then.
  if (!job->ArrivalsVerified() || !job->modules.Valid()) {
    ++discarded_;
    RestartJob(job, kStateLost);
    return;
  }
  rows_ += share.rows;
  job->execution()->Advance(share.rows);
  if (share.logit_rows > 0) job->Sample(logits);
  if (share.chosen) job->TakeChosen();
  if (job->state == State::kRetaining) StartRetain(SharedJob(job));
  if (job->state == State::kPrefill &&
      (job->sampled || job->execution()->rows_left() == 0)) {
    StageDone(SharedJob(job));
  }
}

}  // namespace promptcache::worker
