#include "inference_worker/serving/fair_share.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>

namespace promptcache::worker {
namespace {

// The smallest first: what is left over is known when the others' turn comes.
std::vector<size_t> Even(size_t budget, const std::vector<size_t>& wanted,
                         size_t turn) {
  const size_t count = wanted.size();
  std::vector<size_t> given(count, 0);
  if (budget < count) {
    for (size_t i = 0; i < budget; ++i) {
      const size_t who = (turn + i) % count;
      given[who] = std::min<size_t>(1, wanted[who]);
    }
    return given;
  }
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return wanted[a] != wanted[b] ? wanted[a] < wanted[b] : a < b;
  });
  for (size_t i = 0; i < count; ++i) {
    const size_t left = count - i;
    const size_t share = (budget + left - 1) / left;
    given[order[i]] = std::min(share, wanted[order[i]]);
    budget -= given[order[i]];
  }
  return given;
}

}  // namespace

uint32_t MostThatEnter(uint32_t places) {
  return std::min(places, std::numeric_limits<uint32_t>::max() / 2) * 2;
}

bool MayEnter(uint32_t places, uint32_t taken, uint32_t taken_by_domain,
              uint32_t num_domains) {
  if (taken < places) return true;
  return taken < MostThatEnter(places) &&
         taken_by_domain < places / std::max(1u, num_domains);
}

size_t NextToAdmit(std::span<const std::string_view> waiting,
                   std::span<const std::string_view> running) {
  size_t best = 0;
  auto fewest = running.size() + 1;
  std::map<std::string_view, size_t> counts;
  for (std::string_view domain : running) ++counts[domain];
  for (size_t i = 0; i < waiting.size(); ++i) {
    const size_t count = counts[waiting[i]];
    if (count >= fewest) continue;
    fewest = count;
    best = i;
  }
  return best;
}

std::optional<size_t> NextToPreempt(std::span<const RunningRequest> running) {
  std::map<std::string_view, size_t> counts;
  for (const RunningRequest& request : running) ++counts[request.domain];
  std::optional<size_t> next;
  for (size_t i = 0; i < running.size(); ++i) {
    if (!running[i].may_wait) continue;
    if (!next.has_value() ||
        counts[running[i].domain] >= counts[running[*next].domain]) {
      next = i;
    }
  }
  return next;
}

std::vector<size_t> ShareRows(size_t budget, std::span<const RowsWanted> wanted,
                              size_t turn) {
  std::map<std::string_view, std::vector<size_t>> members;
  for (size_t i = 0; i < wanted.size(); ++i) {
    members[wanted[i].domain].push_back(i);
  }
  std::vector<size_t> totals;
  for (const auto& [domain, indices] : members) {
    size_t total = 0;
    for (size_t i : indices) total += wanted[i].rows;
    totals.push_back(total);
  }
  const std::vector<size_t> of_domain = Even(budget, totals, turn);
  std::vector<size_t> given(wanted.size(), 0);
  size_t d = 0;
  for (const auto& [domain, indices] : members) {
    std::vector<size_t> rows;
    for (size_t i : indices) rows.push_back(wanted[i].rows);
    const std::vector<size_t> shares = Even(of_domain[d++], rows, turn);
    for (size_t k = 0; k < indices.size(); ++k) given[indices[k]] = shares[k];
  }
  return given;
}

}  // namespace promptcache::worker
