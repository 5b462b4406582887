#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

// What the scheduler gives to whom: even between isolation domains, and even
// between the requests of one. Functions of their arguments only.
namespace promptcache::worker {

// The most requests that MayEnter ever lets in.
uint32_t MostThatEnter(uint32_t places);

// A domain below its even share of the places may enter although they are all
// taken, so that nobody is locked out by another's requests; there are never
// more than twice as many. `num_domains` counts those that are there and this
// one.
bool MayEnter(uint32_t places, uint32_t taken, uint32_t taken_by_domain,
              uint32_t num_domains);

// Index into `waiting`, in order of arrival and not empty: the first of the
// domain of which fewest are running.
size_t NextToAdmit(std::span<const std::string_view> waiting,
                   std::span<const std::string_view> running);

struct RunningRequest {
  std::string_view domain;
  bool may_wait = false;  // what it holds can be taken from it now
};

// Index into `running`, oldest first: who is to give its pages back. Of those
// that may wait, the youngest of the domain of which most are running; where
// several domains have as many, the youngest of theirs.
std::optional<size_t> NextToPreempt(std::span<const RunningRequest> running);

struct RowsWanted {
  std::string_view domain;
  size_t rows = 0;
};

// Parallel to `wanted`: together at most `budget`. What one does not need goes
// to the others; where there is less than a row for each, `turn` says who is
// first.
std::vector<size_t> ShareRows(size_t budget, std::span<const RowsWanted> wanted,
                              size_t turn);

}  // namespace promptcache::worker
