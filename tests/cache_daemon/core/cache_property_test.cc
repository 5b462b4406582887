// Random operations against a model that knows who may read and write what,
// and checks the bytes themselves: a lost writer goes on writing, a lost reader
// goes on reading, until their process dies.
#include <map>
#include <random>
#include <set>
#include <vector>

#include "common/progress_word.h"
#include "tests/cache_daemon/core/cache_fixture.h"

namespace promptcache::daemon {
namespace {

constexpr int kNumModules = 30;
constexpr int kNumProcesses = 4;  // numbers of living ones; the dead are new
constexpr int kLostWrite = 200;   // + domain

uint32_t PagesOf(int module) { return 1 + static_cast<uint32_t>(module) % 4; }
int DomainOf(int module) { return module % 2; }
std::string DomainName(int domain) { return domain == 0 ? "default" : "t2"; }
int FillOf(int module) { return 1 + module; }

struct Views {
  int module = 0;
  PageRuns runs;
  uint64_t generation = 0;
  uint32_t progress_word = 0;
};
struct ModelSession {
  SessionId id{};
  int process = 0;  // index; -1: none
  std::string worker;
  uint32_t device = 0;
  std::map<LeaseId, std::vector<Views>> leases;
  std::map<ReservationId, std::pair<LeaseId, Views>> reservations;
};
// Of ended sessions of living processes.
struct Lost {
  int process = 0;
  std::string worker;
  std::vector<Views> read;
  std::vector<Views> written;
};

class CachePropertyTest : public CacheFixture,
                          public ::testing::WithParamInterface<int> {
 protected:
  void Run(int num_steps) {
    random_.seed(static_cast<uint32_t>(GetParam()));
    processes_.clear();
    for (int i = 0; i < kNumProcesses; ++i) processes_.push_back(NewProcess());
    for (int step = 0; step < num_steps && !HasFailure(); ++step) {
      Step();
      TakeResolutions();
      PC_ASSERT_OK(cache_->CheckInvariants()) << "step " << step;
      CheckAgainstModel(step);
    }
    while (!moves_.empty()) StepOfAMove(moves_.begin()->first);
    while (!arrivals_.empty()) StepOfAnArrival(arrivals_.begin()->first);
    RunMover();
    while (!sessions_.empty()) Close(0);
    for (ProcessId process : processes_) cache_->OnProcessDeath(process);
    lost_.clear();
    PC_EXPECT_OK(cache_->CheckInvariants());
    for (const TierStats& tier : cache_->Stats().tiers) {
      EXPECT_EQ(tier.quarantined_bytes, 0u);
      EXPECT_EQ(tier.leased_bytes, 0u);
      EXPECT_EQ(tier.reserved_bytes, 0u);
    }
    PC_EXPECT_OK(cache_->Evict({.all = true}));
    for (const TierStats& tier : cache_->Stats().tiers) {
      EXPECT_EQ(tier.used_bytes, 0u);
    }
    EXPECT_GT(cache_->Stats().hit_lookups, 0u);
    EXPECT_GT(cache_->Stats().aborted_reservations, 0u);
    EXPECT_EQ(cache_->Stats().checksum_mismatches, 0u);
  }

  int Pick(int n) {
    return static_cast<int>(random_() % static_cast<uint32_t>(n));
  }
  ProcessId NewProcess() { return ProcessId{next_process_++}; }

  void Step() {
    const int what = Pick(100);
    if (sessions_.empty() || what < 4) return OpenRandom();
    const size_t s =
        static_cast<size_t>(Pick(static_cast<int>(sessions_.size())));
    if (what < 6) return Close(s);
    if (what < 7) return Die(Pick(kNumProcesses));
    if (what < 40) return AcquireRandom(s);
    if (what < 58) return CommitOrAbort(s);
    if (what < 76) return ReleaseRandom(s);
    if (what < 80) return Admin();
    if (what < 86) clock_.Advance(absl::Seconds(Pick(40)));
    if (what < 88) return cache_->ExpireDue();
    if (what < 94) {
      mover_->RunOnce();
      return;
    }
    Pick(2) == 0 ? StepOfAMove(PickDevice()) : StepOfAnArrival(PickDevice());
  }
  uint32_t PickDevice() {
    const uint32_t n = pool_->num_devices();
    return n == 1 ? 0 : static_cast<uint32_t>(Pick(static_cast<int>(n)));
  }

  void OpenRandom() {
    if (sessions_.size() >= 6) return;
    ModelSession session;
    session.process = Pick(kNumProcesses + 1) - 1;
    session.worker = Pick(2) == 0 ? "w" : "v";
    session.device = PickDevice();
    if (session.process >= 0) {
      // What this declares dropped: earlier ones of the worker.
      for (size_t i = sessions_.size(); i-- > 0;) {
        if (sessions_[i].process == session.process &&
            sessions_[i].worker == session.worker) {
          sessions_.erase(sessions_.begin() + static_cast<long>(i));
        }
      }
      std::erase_if(lost_, [&](const Lost& lost) {
        return lost.process == session.process && lost.worker == session.worker;
      });
    }
    session.id = Open(session.process < 0
                          ? ProcessId{}
                          : processes_[static_cast<size_t>(session.process)],
                      session.worker, kShape, session.device,
                      /*reads_arriving=*/Pick(3) > 0);
    sessions_.push_back(std::move(session));
  }

  void Close(size_t s) {
    const ModelSession session = std::move(sessions_[s]);
    sessions_.erase(sessions_.begin() + static_cast<long>(s));
    cache_->CloseSession(session.id, "closed");
    if (session.process < 0) return;
    Lost lost{.process = session.process, .worker = session.worker};
    for (const auto& [id, views] : session.leases) {
      lost.read.insert(lost.read.end(), views.begin(), views.end());
    }
    for (const auto& [id, reservation] : session.reservations) {
      lost.written.push_back(reservation.second);
    }
    lost_.push_back(std::move(lost));
  }

  void Die(int process) {
    cache_->OnProcessDeath(processes_[static_cast<size_t>(process)]);
    processes_[static_cast<size_t>(process)] = NewProcess();
    std::erase_if(sessions_, [&](const ModelSession& session) {
      return session.process == process;
    });
    std::erase_if(lost_,
                  [&](const Lost& lost) { return lost.process == process; });
  }

  void AcquireRandom(size_t s) {
    const int domain = Pick(2);
    std::set<int> modules;
    for (int i = Pick(4); i >= 0; --i) {
      modules.insert(Pick(kNumModules / 2) * 2 + domain);
    }
    std::vector<AcquireKey> keys;
    for (int m : modules) {
      keys.push_back({.key = KeyOf(m), .num_tokens = PagesOf(m) * 16});
    }
    const uint64_t request = next_request_++;
    waiting_[request] = {sessions_[s].id,
                         std::vector<int>(modules.begin(), modules.end())};
    absl::StatusOr<AcquireResult> result = cache_->Acquire(
        sessions_[s].id, {.request_id = request,
                          .keys = keys,
                          .reserve_missing = Pick(4) > 0,
                          .isolation_domain = DomainName(domain)});
    PC_ASSERT_OK(result);
    size_t i = 0;
    for (int m : modules)
      Take(&sessions_[s], m, result->lease, result->modules[i++]);
  }

  void Take(ModelSession* session, int module, LeaseId lease,
            const AcquiredModule& answer) {
    const Views views{module, answer.runs, answer.generation,
                      answer.progress_word};
    for (const PageRun& run : answer.runs) {
      if (pool_->tier(run.segment) == Tier::kHost) continue;
      EXPECT_EQ(pool_->device(run.segment), session->device);
    }
    switch (answer.outcome) {
      case Outcome::kHit:
        EXPECT_TRUE(Arriving(views) || Holds(views.runs, FillOf(module)));
        session->leases[lease].push_back(views);
        break;
      case Outcome::kReserved:
        CheckNothingForeign(views);
        session->leases[lease];
        session->reservations[answer.reservation] = {lease, views};
        break;
      case Outcome::kPending:
        EXPECT_EQ(answer.miss_reason, MissReason::kNotYetCommitted);
        break;
      case Outcome::kMiss:
        EXPECT_NE(answer.miss_reason, MissReason::kNone);
        break;
    }
  }

  // Old bytes of a reservation are zero or of the same domain.
  void CheckNothingForeign(const Views& views) {
    ForEachPage(views.runs, [&](uint32_t segment, uint32_t page) {
      const int value =
          static_cast<int>(pool_->Page(segment, page, kPageBytes)[77]);
      if (value == 0) return;
      const int domain =
          value >= kLostWrite ? value - kLostWrite : DomainOf(value - 1);
      EXPECT_EQ(domain, DomainOf(views.module)) << "leaks " << value;
    });
  }

  void TakeResolutions() {
    std::vector<PendingResolved> resolved;
    resolved.swap(resolved_);
    for (const PendingResolved& r : resolved) {
      const auto& [id, modules] = waiting_.at(r.request_id);
      for (ModelSession& session : sessions_) {
        if (session.id == id) {
          Take(&session, modules.at(r.index), r.lease, r.module);
        }
      }
    }
  }

  void CommitOrAbort(size_t s) {
    ModelSession& session = sessions_[s];
    if (session.reservations.empty()) return;
    const auto it = session.reservations.begin();
    const ReservationId id = it->first;
    const auto [lease, views] = it->second;
    session.reservations.erase(it);
    if (Pick(5) == 0) {
      Fill(views.runs, kLostWrite + DomainOf(views.module));  // half-written
      PC_EXPECT_OK(cache_->Abort(session.id, {&id, 1}));
      return;
    }
    Fill(views.runs, FillOf(views.module));
    AcquiredModule reserved;
    reserved.reservation = id;
    reserved.runs = views.runs;
    CachePolicy policy;
    if (Pick(3) == 0) policy.ttl = absl::Seconds(Pick(100));
    policy.absolute_ttl = Pick(4) == 0;
    policy.pin = Pick(6) == 0;
    EXPECT_TRUE(CommitOne(session.id, reserved, views.module, policy,
                          random_() % 1000));
    const auto leased = session.leases.find(lease);
    if (leased != session.leases.end()) leased->second.push_back(views);
  }

  void ReleaseRandom(size_t s) {
    ModelSession& session = sessions_[s];
    if (session.leases.empty()) return;
    auto it = session.leases.begin();
    std::advance(it, Pick(static_cast<int>(session.leases.size())));
    Release(session.id, it->first);
    session.leases.erase(it);
  }

  void Admin() {
    const ModuleFilter filter{.keys = {KeyOf(Pick(kNumModules)).ToHex()}};
    switch (Pick(3)) {
      case 0:
        PC_EXPECT_OK(cache_->Evict(filter));
        break;
      case 1:
        PC_EXPECT_OK(cache_->Pin(filter, /*pin=*/true));
        break;
      case 2:
        PC_EXPECT_OK(cache_->Pin(filter, /*pin=*/false));
        break;
    }
  }

  // A move whose copy takes until a later step.
  void StepOfAMove(uint32_t device) {
    const auto under_way = moves_.find(device);
    if (under_way == moves_.end()) {
      const std::optional<MoveTicket> move = cache_->BeginMove(device);
      if (move.has_value()) moves_[device] = *move;
      return;
    }
    const MoveTicket move = under_way->second;
    moves_.erase(under_way);
    cache_->EndMove(
        move, pool_->Copy(move.source, move.destination, move.page_bytes));
  }

  // The same of a promotion with readers.
  void StepOfAnArrival(uint32_t device) {
    const auto under_way = arrivals_.find(device);
    if (under_way == arrivals_.end()) {
      const std::optional<ArrivalTicket> arrival = cache_->BeginArrival(device);
      if (arrival.has_value()) arrivals_[device] = *arrival;
      return;
    }
    const ArrivalTicket arrival = under_way->second;
    arrivals_.erase(under_way);
    cache_->EndArrival(arrival,
                       pool_->CopyByLayers(arrival.source, arrival.destination,
                                           arrival.shape, [](uint32_t) {}));
  }
  // Its readers wait.
  bool Arriving(const Views& views) {
    if (views.progress_word == 0) return false;
    const auto state =
        ProgressState(pool_->Progress(views.progress_word), views.generation);
    return state.has_value() && *state <= kMaxProgressLayers;
  }

  void CheckAgainstModel(int step) {
    size_t num_leases = 0;
    size_t num_reservations = 0;
    for (const Lost& lost : lost_) {
      for (const Views& views : lost.written) {
        Fill(views.runs, kLostWrite + DomainOf(views.module));
      }
    }
    for (const ModelSession& session : sessions_) {
      num_leases += session.leases.size();
      num_reservations += session.reservations.size();
      for (const auto& [id, all] : session.leases) {
        for (const Views& views : all) CheckReadable(views, step);
      }
      for (const auto& [id, reservation] : session.reservations) {
        CheckGeneration(reservation.second, step);
      }
    }
    for (const Lost& lost : lost_) {
      for (const Views& views : lost.read) CheckReadable(views, step);
    }
    const CacheStats stats = cache_->Stats();
    EXPECT_EQ(stats.num_sessions, sessions_.size()) << "step " << step;
    EXPECT_EQ(stats.num_leases, num_leases) << "step " << step;
    EXPECT_EQ(stats.num_reservations, num_reservations) << "step " << step;
    for (const TierStats& tier : stats.tiers) {
      EXPECT_LE(tier.used_bytes, tier.capacity_bytes);
      EXPECT_LE(
          tier.leased_bytes + tier.reserved_bytes + tier.quarantined_bytes,
          tier.used_bytes);
    }
    EXPECT_LE(stats.pinned_bytes, stats.pin_budget_bytes);
  }
  void CheckReadable(const Views& views, int step) {
    EXPECT_TRUE(Arriving(views) || Holds(views.runs, FillOf(views.module)))
        << "step " << step << ": module " << views.module;
    CheckGeneration(views, step);
  }
  void CheckGeneration(const Views& views, int step) {
    const PageRun run = views.runs[0];
    EXPECT_EQ(pool_->Generation(run.segment, run.first_page), views.generation)
        << "step " << step << ": module " << views.module;
  }

  std::mt19937 random_;
  uint64_t next_process_ = 1;
  uint64_t next_request_ = 1;
  std::vector<ProcessId> processes_;
  std::vector<ModelSession> sessions_;
  std::vector<Lost> lost_;
  std::map<uint64_t, std::pair<SessionId, std::vector<int>>> waiting_;
  std::map<uint32_t, MoveTicket> moves_;        // of each device
  std::map<uint32_t, ArrivalTicket> arrivals_;  // of each device
};

TEST_P(CachePropertyTest, RandomUseOfOneTier) {
  Config config{.device_pages = 30};
  config.options.pin_budget_bytes = 6 * kPageBytes;
  config.options.max_known_modules = 10;
  Make(config);
  Run(10000);
}

TEST_P(CachePropertyTest, RandomUseOfTwoTiers) {
  Config config{.device_pages = 40, .host_pages = 16};
  config.options.pin_budget_bytes = 6 * kPageBytes;
  config.options.demote_free_fraction = 0.4;
  Make(config);
  Run(10000);
  EXPECT_GT(cache_->Stats().demotions, 0u);
  EXPECT_GT(cache_->Stats().promotions_on_hit, 0u);
  EXPECT_GT(cache_->Stats().promotions, cache_->Stats().promotions_on_hit);
}

// A run that fails is found again by its seed: nothing hangs on the order of a
// hash table.
TEST_P(CachePropertyTest, SameUseHasTheSameEnd) {
  Config config{.device_pages = 40, .host_pages = 16};
  config.options.demote_free_fraction = 0.4;
  std::vector<CacheStats> ends;
  for (int run = 0; run < 2; ++run) {
    Make(config);
    Run(2000);
    ends.push_back(cache_->Stats());
  }
  EXPECT_EQ(ends[0].hit_lookups, ends[1].hit_lookups);
  EXPECT_EQ(ends[0].demotions, ends[1].demotions);
  EXPECT_EQ(ends[0].promotions, ends[1].promotions);
  EXPECT_EQ(ends[0].promotions_on_hit, ends[1].promotions_on_hit);
  EXPECT_EQ(ends[0].aborted_reservations, ends[1].aborted_reservations);
}

TEST_P(CachePropertyTest, RandomUseOfTwoDevices) {
  Config config{.num_devices = 2, .device_pages = 32, .host_pages = 16};
  config.options.pin_budget_bytes = 12 * kPageBytes;
  config.options.demote_free_fraction = 0.4;
  Make(config);
  Run(10000);
  const CacheStats stats = cache_->Stats();
  EXPECT_GT(stats.demotions, 0u);
  EXPECT_GT(stats.promotions, 0u);
  EXPECT_GT(stats.misses[static_cast<size_t>(MissReason::kOnOtherDevice)].count,
            0u);
}

INSTANTIATE_TEST_SUITE_P(Seeds, CachePropertyTest, ::testing::Range(1, 5));

}  // namespace
}  // namespace promptcache::daemon
