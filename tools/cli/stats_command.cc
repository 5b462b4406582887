#include <unistd.h>

#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "tools/cli/app.h"
#include "tools/cli/cache_commands.h"
#include "tools/cli/cli_status.h"
#include "tools/cli/placement_text.h"
#include "tools/cli/proto_json.h"
#include "tools/cli/terminal.h"

namespace promptcache::cli {
namespace {

std::string Percent(uint64_t part, uint64_t rest) {
  if (part + rest == 0) return "-";
  return absl::StrFormat("%.1f %%", 100.0 * static_cast<double>(part) /
                                        static_cast<double>(part + rest));
}

std::string TierTable(const v1::CacheStats& stats) {
  std::vector<std::vector<std::string>> rows{
      {"tier", "kind", "capacity", "used", "leased", "pinned", "reserved",
       "quarantined", "largest free", "modules"}};
  for (const auto& tier : stats.tiers()) {
    rows.push_back(
        {TierText(tier.tier(), tier.device_uuid()), tier.kind(),
         HumanBytes(tier.capacity_bytes()), HumanBytes(tier.used_bytes()),
         HumanBytes(tier.leased_bytes()), HumanBytes(tier.pinned_bytes()),
         HumanBytes(tier.reserved_bytes()),
         HumanBytes(tier.quarantined_bytes()),
         HumanBytes(tier.largest_free_run_bytes()),
         WithCommas(tier.num_modules())});
  }
  return FormatTable(rows, "");
}

// Where the tiers' memory is, and how workers map it.
std::string Handles(const v1::CacheStats& stats) {
  std::string out;
  for (const auto& tier : stats.tiers()) {
    if (tier.handle_kinds().empty()) continue;  // an older daemon
    absl::StrAppendFormat(
        &out, "mapped    %s tier: memory of %s, %s in workers (by %s)\n",
        EnumWord(v1::Tier_descriptor(), tier.tier()),
        tier.device_uuid().empty()
            ? "the CPU"
            : absl::StrCat(tier.device_name(), " ", tier.device_uuid()),
        tier.mapped_read_only() ? "read-only" : "writable",
        absl::StrJoin(tier.handle_kinds(), ", "));
  }
  return out;
}

std::string Counts(const v1::CacheStats& stats) {
  std::string out = absl::StrFormat(
      "lookups   %s hits, %s misses (%s hits); tokens %s and %s (%s)\n",
      WithCommas(stats.hit_lookups()), WithCommas(stats.miss_lookups()),
      Percent(stats.hit_lookups(), stats.miss_lookups()),
      WithCommas(stats.hit_tokens()), WithCommas(stats.miss_tokens()),
      Percent(stats.hit_tokens(), stats.miss_tokens()));
  for (const auto& miss : stats.misses()) {
    if (miss.lookups() == 0) continue;
    absl::StrAppendFormat(&out, "  missed: %s, %s lookups, %s tokens\n",
                          EnumWord(v1::MissReason_descriptor(), miss.reason()),
                          WithCommas(miss.lookups()),
                          WithCommas(miss.tokens()));
  }
  if (stats.missed_probe_lookups() > 0) {
    absl::StrAppendFormat(
        &out,
        "  besides: %s lookups, %s tokens of prompts without a schema; nobody "
        "asked to keep such text (--retain), so these are no misses\n",
        WithCommas(stats.missed_probe_lookups()),
        WithCommas(stats.missed_probe_tokens()));
  }
  absl::StrAppendFormat(
      &out, "requests  %s tokens read from the cache, %s created, %s fresh\n",
      WithCommas(stats.request_cached_tokens()),
      WithCommas(stats.request_created_tokens()),
      WithCommas(stats.request_fresh_tokens()));
  if (stats.request_preemptions() > 0) {
    absl::StrAppendFormat(
        &out,
        "paused    %s times for want of workers' pages (--tail_bytes), %s "
        "tokens computed again\n",
        WithCommas(stats.request_preemptions()),
        WithCommas(stats.request_recomputed_tokens()));
  }
  if (stats.attention_read_tokens() > 0) {
    absl::StrAppendFormat(&out,
                          "attention %s tokens needed, %s read from memory\n",
                          WithCommas(stats.attention_needed_tokens()),
                          WithCommas(stats.attention_read_tokens()));
  }
  for (const auto& state : stats.modules()) {
    if (state.num_modules() == 0) continue;
    absl::StrAppendFormat(
        &out, "modules   %s %s\n", WithCommas(state.num_modules()),
        EnumWord(v1::ModuleState_descriptor(), state.state()));
  }
  for (const auto& eviction : stats.evictions()) {
    if (eviction.num_modules() == 0) continue;
    absl::StrAppendFormat(
        &out, "evicted   %s (%s), %s\n", WithCommas(eviction.num_modules()),
        HumanBytes(eviction.bytes()),
        EnumWord(v1::EvictReason_descriptor(), eviction.reason()));
  }
  if (stats.pins_refused() > 0) {
    absl::StrAppendFormat(&out, "pins      %s refused: the budget is full\n",
                          WithCommas(stats.pins_refused()));
  }
  if (stats.promotions() + stats.demotions() > 0) {
    absl::StrAppendFormat(
        &out,
        "moved     %s modules to a device (%s of them for a request that "
        "waited), %s to the host tier\n",
        WithCommas(stats.promotions()), WithCommas(stats.promotions_on_hit()),
        WithCommas(stats.demotions()));
  }
  absl::StrAppendFormat(
      &out,
      "written   %s modules, %s given up halfway; %s found corrupt\n"
      "now       workers %d, requests reading modules %d, "
      "modules being written %d, schemas %d\n",
      WithCommas(stats.commits()), WithCommas(stats.aborted_reservations()),
      WithCommas(stats.checksum_mismatches()), stats.num_sessions(),
      stats.num_leases(), stats.num_reservations(), stats.num_schemas());
  return out;
}

std::string StatsText(const v1::CacheStats& stats) {
  const absl::Duration up =
      absl::Now() - absl::FromUnixSeconds(stats.start_time().seconds());
  return absl::StrCat("daemon ", stats.daemon_id().substr(0, 12), ", up ",
                      absl::FormatDuration(absl::Trunc(up, absl::Seconds(1))),
                      "\n", TierTable(stats), Handles(stats), Counts(stats));
}

int Stats(const Globals& globals, bool watch, double interval_s) {
  auto daemon = globals.ConnectDaemon();
  if (!daemon.ok()) return Report(daemon.status(), globals.json);
  for (;;) {
    auto stats = (*daemon)->GetStats();
    if (!stats.ok()) return Report(stats.status(), globals.json);
    if (globals.json) {
      // One object a line when watching, so that a script reads lines.
      std::cout << ToJson(*stats).dump(watch ? -1 : 2) << "\n" << std::flush;
    } else {
      if (watch && StdoutIsTerminal()) std::cout << "\x1b[H\x1b[2J";
      std::cout << StatsText(*stats) << std::flush;
    }
    if (!watch) return kExitOk;
    absl::SleepFor(absl::Seconds(interval_s));
    if (!globals.json && !StdoutIsTerminal()) std::cout << "\n";
  }
}

}  // namespace

void AddStats(CLI::App* app, const Globals* globals, Action* action) {
  auto watch = std::make_shared<bool>(false);
  auto interval_s = std::make_shared<double>(1);
  CLI::App* command = app->add_subcommand(
      "stats", "what the cache holds, hits, misses and their reasons");
  command->footer(
      "\nTiers:   device: memory that models read in place, of a GPU or, "
      "without one, of\n         the CPU (memfd: shared between processes; "
      "plain or huge: its pages).\n         host: where GPUs' modules go when "
      "there is no room for them.\n"
      "Columns: leased: being read; pinned: never evicted; reserved: being "
      "written;\n         quarantined: kept back until a lost worker is "
      "surely gone.\n"
      "Lookups: one for each module that a request asked for; hits were "
      "there.\n"
      "Attention: a module that several requests need at a time is read once; "
      "not\n         counted on GPUs.");
  command->add_flag("-w,--watch", *watch, "again and again, until Ctrl-C");
  command->add_option("--interval", *interval_s, "seconds between two looks")
      ->check(CLI::Range(0.05, 3600.0))
      ->capture_default_str();
  command->callback(
      [=] { *action = [=] { return Stats(*globals, *watch, *interval_s); }; });
}

}  // namespace promptcache::cli
