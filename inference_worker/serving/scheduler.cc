#include "inference_worker/serving/scheduler.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "inference_worker/serving/fair_share.h"

namespace promptcache::worker {
namespace {

using State = GenerationJob::State;

constexpr absl::Duration kLeaseCheckInterval = absl::Milliseconds(200);

// Left for each running request by one that is admitted: who were admitted
// into the last pages would give them back at once.
constexpr uint64_t kPagesAhead = 2;

constexpr char kNotWaitedFor[] =
    "not kept, as far as is known: the deadline came before the cache's answer";

}  // namespace

absl::Status Scheduler::Options::Validate() const {
  if (max_running == 0 || max_running > 1024) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_running is ", max_running, ", must be 1 to 1024"));
  }
  if (step_tokens <= max_running) {
    return absl::InvalidArgumentError(
        absl::StrCat("step_tokens is ", step_tokens,
                     ", must be more than max_running (", max_running, ")"));
  }
  if (reader_patience < absl::ZeroDuration() ||
      reader_limit < reader_patience) {
    return absl::InvalidArgumentError(absl::StrCat(
        "reader_patience is ", absl::FormatDuration(reader_patience),
        ", must be 0 to reader_limit (", absl::FormatDuration(reader_limit),
        ")"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Scheduler>> Scheduler::Create(
    const Options& options, Backend* backend, PrivatePages* pages,
    const Tokenizer* tokenizer, CacheClient* client) {
  if (absl::Status s = options.Validate(); !s.ok()) return s;
  return std::unique_ptr<Scheduler>(
      new Scheduler(options, backend, pages, tokenizer, client));
}

Scheduler::Scheduler(const Options& options, Backend* backend,
                     PrivatePages* pages, const Tokenizer* tokenizer,
                     CacheClient* client)
    : options_(options),
      backend_(backend),
      pages_(pages),
      tokenizer_(tokenizer),
      client_(client),
      acquisition_{.verify = options.verify,
                   .layout = backend->layout(),
                   .memory = pages->memory()},
      context_length_(
          options.context_length == 0
              ? backend->context_length()
              : std::min(options.context_length, backend->context_length())),
      executor_(std::make_unique<Executor>(2 * options.max_running)),
      thread_([this] { Run(); }) {}

Scheduler::~Scheduler() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    draining_ = true;
  }
  changed_.SignalAll();
  thread_.join();
  executor_.reset();
  // What tasks were still to say: jobs in them go without their sinks, which
  // have been told.
  std::deque<std::function<void()>> rest;
  {
    MutexLock lock(&mu_);
    rest.swap(completions_);
  }
}

absl::StatusOr<std::shared_ptr<CancelFlag>> Scheduler::Submit(
    GenerationRequest request, std::shared_ptr<GenerationSink> sink) {
  if (request.link_tokens > 0 && backend_->decoder_start().has_value()) {
    return absl::InvalidArgumentError(
        "link_tokens: the spans of an encoder-decoder model see nothing of "
        "each other, there is nothing to link");
  }
  auto cancel = std::make_shared<CancelFlag>();
  auto job = std::make_shared<GenerationJob>(
      std::move(request), std::move(sink), cancel, pages_, tokenizer_,
      context_length_, backend_->decoder_start());
  // Without the cache nothing is warmed, which is told when it is its turn.
  const bool cached = AsksCache(*job) || job->request.warm;
  if (absl::Status s = job->CheckPages(cached); !s.ok()) return s;
  {
    MutexLock lock(&mu_);
    if (draining_) {
      return absl::UnavailableError("the worker is shutting down");
    }
    const std::string& domain = job->request.isolation_domain;
    const auto own = places_of_.find(domain);
    const uint32_t num_own = own == places_of_.end() ? 0 : own->second;
    const auto num_domains =
        static_cast<uint32_t>(places_of_.size() + (num_own == 0 ? 1 : 0));
    if (!MayEnter(num_places(), places_taken_, num_own, num_domains)) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the queue is full: ", places_taken_,
                       " requests are running or waiting"));
    }
    ++num_requests_;
    TakePlace(job.get());
    job->sequence = next_sequence_++;
    arrivals_.push_back(std::move(job));
  }
  changed_.SignalAll();
  return cancel;
}

void Scheduler::TakePlace(GenerationJob* job) {
  if (job->has_place) return;
  job->has_place = true;
  ++places_taken_;
  ++places_of_[job->request.isolation_domain];
}

void Scheduler::GivePlaceBack(GenerationJob* job) {
  if (!job->has_place) return;
  job->has_place = false;
  --places_taken_;
  const auto it = places_of_.find(job->request.isolation_domain);
  if (--it->second == 0) places_of_.erase(it);
}

void Scheduler::Wake() {
  {
    MutexLock lock(&mu_);
    woken_ = true;
  }
  changed_.SignalAll();
}

bool Scheduler::Drain(absl::Time deadline) {
  MutexLock lock(&mu_);
  draining_ = true;
  while (num_requests_ > 0) {
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) break;
    changed_.WaitWithTimeout(&mu_, std::min(left, absl::Seconds(1)));
  }
  return num_requests_ == 0;
}

SchedulerStats Scheduler::stats() const {
  SchedulerStats s;
  s.steps = steps_;
  s.rows = rows_;
  s.requests_done = done_;
  s.requests_failed = failed_;
  s.restarts = restarts_;
  s.discarded_steps = discarded_;
  s.corrupt_pages = corrupt_;
  s.modules_encoded = encoded_;
  s.preemptions = preemptions_;
  s.reader_pauses = reader_pauses_;
  s.recomputed_tokens = recomputed_tokens_;
  s.attention = {.needed_tokens = needed_tokens_, .read_tokens = read_tokens_};
  return s;
}

uint32_t Scheduler::num_requests() const {
  MutexLock lock(&mu_);
  return num_requests_;
}

uint32_t Scheduler::max_requests() const {
  const uint64_t most = uint64_t{MostThatEnter(num_places())} + num_places();
  return static_cast<uint32_t>(
      std::min<uint64_t>(most, std::numeric_limits<uint32_t>::max()));
}

void Scheduler::Run() {
  bool runnable = false;
  while (WaitForWork(runnable)) {
    CheckDeadlines();
    EndDoneJobs();
    NoteReaders();
    while (TakeFromSlowReader(options_.reader_limit)) {
    }
    AdmitQueued();
    runnable = Step();
    EndDoneJobs();
  }
  const absl::Status end = absl::CancelledError("the worker is shutting down");
  for (const Job& job : running_) Fail(job.get(), end);
  for (const Job& job : queue_) Fail(job.get(), end);
}

void Scheduler::Fail(GenerationJob* job, const absl::Status& status) {
  job->Finish(status);
  job->cancel->Cancel();  // a task on the executor looks at it
}

bool Scheduler::WaitForWork(bool runnable) {
  std::deque<std::function<void()>> completions;
  {
    MutexLock lock(&mu_);
    if (!runnable) {
      // A lost session's leases are given up even when their readers are slow.
      absl::Time next = running_.empty() ? absl::InfiniteFuture()
                                         : absl::Now() + kLeaseCheckInterval;
      const absl::Time now = absl::Now();
      for (const Job& job : running_) {
        if (job->state != State::kDone) next = std::min(next, DueTime(*job));
        // Once: who has been behind for so long already is not waited for.
        const absl::Time due = job->behind_since + options_.reader_patience;
        if (due > now) next = std::min(next, due);
      }
      for (const Job& job : queue_)
        next = std::min(next, job->request.deadline);
      while (!stopping_ && !woken_ && arrivals_.empty() &&
             completions_.empty()) {
        const absl::Duration left = next - absl::Now();
        if (left <= absl::ZeroDuration()) break;
        if (left == absl::InfiniteDuration()) {
          changed_.Wait(&mu_);
        } else {
          changed_.WaitWithTimeout(&mu_, left);
        }
      }
    }
    for (Job& job : arrivals_) queue_.push_back(std::move(job));
    arrivals_.clear();
    if (stopping_) return false;
    woken_ = false;
    completions.swap(completions_);
  }
  for (const auto& completion : completions) completion();
  return true;
}

void Scheduler::ReportUse(const GenerationJob& job) {
  if (client_ == nullptr) return;
  const GenerationJob::Pauses& pauses = job.page_pauses;
  RequestUse use{.preemptions = pauses.count,
                 .recomputed_tokens = pauses.recomputed_tokens};
  if (job.succeeded && !job.request.warm) {
    use.cached_tokens = job.usage.cached_tokens;
    use.created_tokens = job.usage.created_tokens;
    use.fresh_tokens = job.usage.fresh_tokens;
  } else if (pauses.count == 0) {
    return;
  }
  const AttentionReads reads = {.needed_tokens = needed_tokens_,
                                .read_tokens = read_tokens_};
  use.attention_needed_tokens =
      reads.needed_tokens - reported_reads_.needed_tokens;
  use.attention_read_tokens = reads.read_tokens - reported_reads_.read_tokens;
  reported_reads_ = reads;
  client_->ReportUse(use);
}

void Scheduler::EndDoneJobs() {
  std::vector<Job> ended;
  const auto over = [&](const Job& job) {
    if (job->state != State::kDone || job->task_running) return false;
    ended.push_back(job);
    ++(job->succeeded ? done_ : failed_);
    ReportUse(*job);
    return true;
  };
  std::erase_if(running_, over);
  std::erase_if(queue_, over);
  if (ended.empty()) return;
  {
    MutexLock lock(&mu_);
    num_requests_ -= static_cast<uint32_t>(ended.size());
    for (const Job& job : ended) GivePlaceBack(job.get());
  }
  changed_.SignalAll();  // Drain
}

absl::Time Scheduler::DueTime(const GenerationJob& job) const {
  return job.answered() ? job.request.deadline - options_.reply_time
                        : job.request.deadline;
}

void Scheduler::CheckDeadlines() {
  const absl::Time now = absl::Now();
  const auto check = [&](const Job& job) {
    if (job->state == State::kDone) return;
    if (job->cancel->cancelled() && job->state != State::kRetaining) {
      Fail(job.get(), absl::CancelledError("cancelled by the caller"));
    } else if (now < DueTime(*job)) {
      return;
    } else if (job->answered()) {
      job->FinishUnkept(kNotWaitedFor);
    } else {
      Fail(job.get(),
           absl::DeadlineExceededError(
               "the deadline passed before the answer was complete"));
    }
  };
  for (const Job& job : running_) check(job);
  for (const Job& job : queue_) check(job);
}

void Scheduler::NoteReaders() {
  const absl::Time now = absl::Now();
  for (const Job& job : running_) {
    const bool behind = job->state == State::kDecode && !job->sink->Ready();
    job->behind_since =
        behind ? std::min(job->behind_since, now) : absl::InfiniteFuture();
  }
}

// What a paused request could do for a reader that is behind is nothing, or a
// token for all that must be computed again.
std::deque<Scheduler::Job>::iterator Scheduler::NextQueued() {
  std::vector<size_t> places;  // in queue_
  std::vector<std::string_view> waiting;
  std::vector<std::string_view> running;
  running.reserve(running_.size());
  for (size_t i = 0; i < queue_.size(); ++i) {
    if (queue_[i]->started() && !queue_[i]->sink->CaughtUp()) continue;
    places.push_back(i);
    waiting.push_back(queue_[i]->request.isolation_domain);
  }
  if (waiting.empty()) return queue_.end();
  for (const Job& job : running_) {
    running.push_back(job->request.isolation_domain);
  }
  return queue_.begin() +
         static_cast<std::ptrdiff_t>(places[NextToAdmit(waiting, running)]);
}

size_t Scheduler::MissingSlots() const {
  const auto waiting = static_cast<size_t>(std::count_if(
      running_.begin(), running_.end(),
      [](const Job& job) { return job->state == State::kWaiting; }));
  const size_t most = options_.max_running;
  const size_t slots = most + std::min(waiting, most);
  return running_.size() < slots ? 0 : running_.size() + 1 - slots;
}

bool Scheduler::AsksCache(const GenerationJob& job) const {
  return client_ != nullptr && options_.no_reuse.empty() && job.wants_cache();
}

// What those that wait have lent is theirs before it is anybody's who comes.
uint64_t Scheduler::PagesAhead() const {
  uint64_t pages = kPagesAhead * running_.size();
  for (const Job& job : running_) pages += job->lent_pages();
  return pages;
}

// In a domain in order of arrival. Who is next and finds no pages waits for
// them, and is not starved by small ones behind it.
void Scheduler::AdmitQueued() {
  while (true) {
    const auto next = NextQueued();
    if (next == queue_.end()) return;
    if (const size_t missing = MissingSlots(); missing > 0) {
      if (!TakeFromSlowReaders(missing, options_.reader_patience)) return;
      continue;
    }
    GenerationJob& first = **next;
    const bool refused = !options_.no_reuse.empty() && first.wants_cache();
    const bool with_cache = AsksCache(first);
    if (first.request.warm && !with_cache) {
      Fail(&first, absl::UnavailableError(
                       absl::StrCat("modules cannot be kept: ",
                                    refused ? options_.no_reuse : "no cache")));
      EndDoneJobs();
      continue;
    }
    // A loss may have turned it away from the cache.
    if (absl::Status s = first.CheckPages(/*cached=*/with_cache); !s.ok()) {
      Fail(&first, s);
      EndDoneJobs();
      continue;
    }
    if (!first.Admit(with_cache, PagesAhead())) {
      if (!TakeFromSlowReader(options_.reader_patience)) return;
      continue;
    }
    const Job job = std::move(*next);
    queue_.erase(next);
    running_.push_back(job);
    {
      MutexLock lock(&mu_);
      TakePlace(job.get());  // again, who waited for its reader
    }
    if (job->timings.queue == absl::ZeroDuration()) {
      job->timings.queue =
          absl::Now() - job->request.arrival - job->timings.compile;
    }
    if (with_cache) {
      StartAcquire(job);
    } else {
      ModuleSet set = PrivateModules(job->request);
      // Who asked for nothing to be kept or read need not be told.
      if (refused && (job->request.prompt->chunk_tokens == 0 ||
                      job->request.retain.has_value())) {
        set.AddNotice(
            absl::StrCat("answered without the cache: ", options_.no_reuse));
      }
      OnAcquired(job, std::move(set));
    }
  }
}

void Scheduler::RestartJob(GenerationJob* job, const std::string& notice) {
  ++restarts_;
  job->Restart(notice);
  Requeue(job);
}

void Scheduler::Preempt(GenerationJob* job, GenerationJob::Pause pause) {
  ++(pause == GenerationJob::Pause::kPages ? preemptions_ : reader_pauses_);
  const uint64_t before = job->recomputed_tokens();
  job->Preempt(pause);
  recomputed_tokens_ += job->recomputed_tokens() - before;
  Requeue(job);
  if (pause != GenerationJob::Pause::kReader) return;
  MutexLock lock(&mu_);
  if (num_requests_ - places_taken_ < num_places()) GivePlaceBack(job);
}

void Scheduler::Requeue(GenerationJob* job) {
  requeued_ = true;
  const Job shared = SharedJob(job);
  std::erase(running_, shared);
  const auto younger = std::find_if(
      queue_.begin(), queue_.end(),
      [job](const Job& other) { return other->sequence > job->sequence; });
  queue_.insert(younger, shared);
}

Scheduler::Job Scheduler::SharedJob(const GenerationJob* job) const {
  for (const Job& shared : running_) {
    if (shared.get() == job) return shared;
  }
  LOG(FATAL) << "a job that is not running";
}

}  // namespace promptcache::worker
