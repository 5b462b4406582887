#pragma once

#include <cstdint>

namespace promptcache::worker {

// The bucket of a distance (position of the key minus position of the query)
// as T5 has it: half of the buckets are a distance each, the others widen
// logarithmically up to max_distance, the last one has everything from there
// on. Of an encoder (`both_ways`), one half of all buckets is for keys after
// the query; else keys after it are as distance 0.
// REQUIRES: buckets is even, at least 4; max_distance > buckets / 2.
uint32_t RelativeBucket(int32_t distance, uint32_t buckets,
                        uint32_t max_distance, bool both_ways);

}  // namespace promptcache::worker
