#include "inference_worker/serving/generation_job.h"

#include <algorithm>
#include <utility>

#include "common/status_macros.h"
#include "glog/logging.h"
#include "inference_worker/serving/leased_arrival.h"

namespace promptcache::worker {
namespace {

uint32_t RoomAfter(const GenerationRequest& request, uint32_t context_length,
                   bool has_encoder) {
  const pml::Plan& plan = *request.prompt->plan;
  int32_t used = request.full_attention ? plan.num_tokens : plan.next_position;
  // The decoder counts its own tokens only, and has its first one.
  if (has_encoder) used = 1;
  const int64_t room = int64_t{context_length} - used;
  return static_cast<uint32_t>(
      std::clamp<int64_t>(room, 0, request.max_tokens));
}

}  // namespace

GenerationJob::GenerationJob(GenerationRequest req,
                             std::shared_ptr<GenerationSink> s,
                             std::shared_ptr<CancelFlag> c, PrivatePages* pages,
                             const Tokenizer* tokenizer,
                             uint32_t context_length,
                             std::optional<int32_t> decoder_start)
    : request(std::move(req)),
      sink(std::move(s)),
      cancel(std::move(c)),
      pages_(pages),
      decoder_start_(decoder_start),
      room_(RoomAfter(request, context_length, decoder_start.has_value())),
      tokens_(tokenizer, request, room_) {
  timings.compile = request.compile_time;
  MakeExecution();
}

GenerationJob::~GenerationJob() { Release(); }

void GenerationJob::MakeExecution() {
  PlanExecution::Options options;
  options.full_attention = request.full_attention;
  // In a prefix chain every token saw all before it: nothing is to be linked.
  if (request.prompt->chunk_tokens == 0) {
    options.link_tokens = request.link_tokens;
  }
  if (!request.full_attention) {
    options.chunk_tokens = static_cast<uint32_t>(request.prompt->chunk_tokens);
  }
  options.decoder_start = decoder_start_;
  options.memory = pages_->memory();
  options.max_new_tokens = request.warm ? 0 : room_;
  execution_ = std::make_unique<PlanExecution>(request.prompt->plan,
                                               pages_->layout(), options);
  encoded_.assign(request.prompt->plan->modules.size(), false);
  earlier_.resize(encoded_.size(), StateSource::kFresh);
  spared_.resize(encoded_.size(), false);
  fresh_queued_ = false;
}

absl::Status GenerationJob::ReadModule(size_t module) {
  const AcquiredModule& acquired = modules.lease->modules()[module];
  std::unique_ptr<Arrival> arrival;
  if (ReadsCopy(module)) {
    const std::vector<std::byte*> copies =
        TakePages(acquired.read_pages.size());
    execution_->SetReadable(module, {copies.begin(), copies.end()});
    PC_ASSIGN_OR_RETURN(
        arrival, pages_->memory()->StartCopyFromHost(acquired.read_pages,
                                                     copies, pages_->layout()));
  } else {
    execution_->SetReadable(module, acquired.read_pages);
    if (!acquired.arriving) return absl::OkStatus();
    arrival = std::make_unique<LeasedArrival>(
        modules.lease.get(), module,
        std::min(request.deadline, absl::Now() + kArrivalTimeout));
  }
  execution_->AddArrival(arrival.get());
  arrivals_.push_back(std::move(arrival));
  return absl::OkStatus();
}

bool GenerationJob::ArrivalsVerified() {
  bool verified = true;
  for (const std::unique_ptr<Arrival>& arrival : arrivals_) {
    verified = arrival->AwaitVerified() && verified;
    timings.arrival += arrival->waited();
  }
  execution_->ClearArrivals();
  arrivals_.clear();
  return verified;
}

absl::Status GenerationJob::BeginStage() {
  state = State::kPrefill;
  sampled = false;
  stage_begin = absl::Now();
  for (size_t i = 0; i < modules.sources.size(); ++i) {
    const ModuleSource source = modules.sources[i];
    if (encoded_[i] || request.full_attention) continue;
    if (source == ModuleSource::kRead) {
      if (absl::Status s = ReadModule(i); !s.ok()) return s;
    } else if (source == ModuleSource::kCreate) {
      const AcquiredModule& module = modules.lease->modules()[i];
      execution_->SetWritable(i, module.read_pages, module.write_pages);
    } else if (source == ModuleSource::kPrivate) {
      auto pages = TakePages(execution_->module_pages(i));
      std::vector<const std::byte*> read(pages.begin(), pages.end());
      execution_->SetWritable(i, std::move(read), std::move(pages));
    } else {
      continue;
    }
    encoded_[i] = true;
    if (source == ModuleSource::kRead) continue;
    execution_->EncodeModule(i, TakePages(execution_->temporary_pages(i)));
    if (!spared_[i]) continue;
    spared_[i] = false;
    last_pauses_->recomputed_tokens += execution_->module_rows(i);
  }
  if (!execution_->memory_status().ok()) return execution_->memory_status();
  if (request.warm || modules.HasPending() || fresh_queued_) {
    return absl::OkStatus();
  }
  fresh_queued_ = true;
  execution_->ComputeFresh();
  if (!tokens_.generated().empty()) execution_->Append(tokens_.generated());
  return absl::OkStatus();
}

void GenerationJob::Emit(TokenEvent event) {
  if (started_) {
    sink->OnToken(std::move(event));
  } else {
    unsent_.push_back(std::move(event));
  }
}

TokenChoice* GenerationJob::NextChoice() {
  choice_ = tokens_.NextChoice();
  return choice_.has_value() ? &*choice_ : nullptr;
}

void GenerationJob::Sample(std::span<const float> logits) {
  AddToken(tokens_.Next(logits));
}

void GenerationJob::TakeChosen() {
  if (choice_.has_value()) AddToken(tokens_.Next(choice_->token));
}

void GenerationJob::AddToken(TokenEvent event) {
  Emit(std::move(event));
  sampled = true;
  if (state == State::kDecode && tokens_.finished()) {
    Complete();
  } else if (!tokens_.finished()) {
    execution_->Append(std::span(tokens_.generated()).last(1));
  }
}

void GenerationJob::StartDecoding() {
  state = State::kDecode;
  SendStart();
  if (request.warm || tokens_.finished()) Complete();
}

void GenerationJob::SendStart() {
  if (started_) return;
  started_ = true;
  decode_begin_ = absl::Now();
  timings.ttft = decode_begin_ - request.arrival;
  StartedEvent event;
  event.usage = CurrentUsage();
  event.usage.completion_tokens = 0;
  event.spans = Spans();
  event.misses = Misses();
  event.notices = Notices();
  event.ttft = timings.ttft;
  sink->OnStarted(event);
  for (TokenEvent& token : unsent_) sink->OnToken(std::move(token));
  unsent_.clear();
}

void GenerationJob::Complete() {
  if (request.retain.has_value() && !request.full_attention) {
    state = State::kRetaining;
    return;
  }
  if (request.retain.has_value()) {
    modules.AddNotice("nothing retained: full attention leaves nothing");
  }
  Finish(absl::OkStatus());
}

FinishedTail GenerationJob::TailToRetain() const {
  FinishedTail tail;
  const pml::Plan& plan = *request.prompt->plan;
  tail.first_chunk = plan.modules.size();
  tail.pages = execution_->WholeTailChunks();
  const auto chunk = static_cast<size_t>(request.prompt->chunk_tokens);
  const size_t chunks = tail.first_chunk + tail.pages.size() *
                                               pages_->layout().page_tokens /
                                               chunk;
  for (const pml::PlanSpan& span : plan.spans) {
    tail.tokens.insert(tail.tokens.end(), span.tokens.begin(),
                       span.tokens.end());
  }
  const std::vector<int32_t>& answer = tokens_.generated();
  tail.tokens.insert(tail.tokens.end(), answer.begin(), answer.end());
  tail.tokens.resize(chunks * chunk);
  for (size_t i = 0; i < tail.first_chunk; ++i) {
    tail.read.push_back(SourceOf(i) == StateSource::kRead);
    tail.cached.push_back(IsCached(i));
  }
  return tail;
}

void GenerationJob::FinishRetained(const RetainedTail& tail) {
  if (tail.has_prompt) {
    retained_chunks_ =
        static_cast<uint32_t>(modules.sources.size()) + tail.chunks;
  }
  if (!tail.notice.empty()) {
    modules.AddNotice(tail.notice);
  } else if (CountRetained() == 0) {
    modules.AddNotice(absl::StrCat("nothing retained: fewer than ",
                                   request.prompt->chunk_tokens, " tokens"));
  }
  Finish(absl::OkStatus());
}

void GenerationJob::FinishUnkept(const std::string& notice) {
  notices_.push_back(notice);
  SendStart();
  Finish(absl::OkStatus());
}

void GenerationJob::Finish(const absl::Status& status) {
  if (state == State::kDone) return;
  const absl::Time now = absl::Now();
  timings.total = now - request.arrival;
  if (started_) timings.decode = now - decode_begin_;
  CompletedEvent event;
  event.timings = timings;
  event.finish_reason = tokens_.finish_reason();
  event.stop_string = tokens_.stop_string();
  if (status.ok()) {
    succeeded = true;
    usage = CurrentUsage();
    event.usage = usage;
    event.notices = Notices();
    event.logits_sha256 = tokens_.LogitsSha256();
    for (size_t i = 0; i < modules.sources.size(); ++i) {
      event.modules.push_back(SourceOf(i));
    }
  }
  state = State::kDone;
  if (!task_running) Release();
  sink->OnDone(status, event);
}

void GenerationJob::Restart(const std::string& notice) {
  for (const std::string& n : modules.notices) notices_.push_back(n);
  notices_.push_back(notice);
  private_only_ = restarted_ || CheckPages(/*cached=*/false).ok();
  restarted_ = true;
  earlier_.assign(earlier_.size(), StateSource::kFresh);
  spared_.assign(spared_.size(), false);
  GiveBack();
}

void GenerationJob::Preempt(Pause pause) {
  uint64_t rows = execution_->rows_done();
  for (size_t i = 0; i < modules.sources.size(); ++i) {
    const StateSource now = SourceNow(i);
    // It stays in the cache.
    if (now == StateSource::kCreated) rows -= execution_->module_rows(i);
    if (now != StateSource::kComputed) spared_[i] = true;
    // What an answer was not begun with counts when it was kept, at most.
    if (state == State::kDecode || now == StateSource::kCreated) {
      earlier_[i] = SourceOf(i);
    }
  }
  last_pauses_ = pause == Pause::kPages ? &page_pauses : &reader_pauses;
  ++last_pauses_->count;
  last_pauses_->recomputed_tokens += rows;
  if (!modules.gave_up.empty()) notices_.push_back(modules.gave_up);
  GiveBack();
}

void GenerationJob::GiveBack() {
  CHECK(!answered()) << "the last row would be sampled again";
  if (!modules.gave_up.empty()) waits_no_more_ = true;
  Release();
  MakeExecution();
  behind_since = absl::InfiniteFuture();
  state = State::kQueued;
}

void GenerationJob::Release() {
  arrivals_.clear();
  modules = ModuleSet{};
  execution_.reset();
  spare_pages_.clear();
  lent_pages_ = 0;
  if (!held_pages_.empty()) pages_->Free(std::exchange(held_pages_, {}));
}

}  // namespace promptcache::worker
