#pragma once
// The threads of a thread block, which speak to each other: each runs until it waits for others, then the next one
// does. Wrong is what CUDA leaves open: a thread that ends while others of its block wait for it, and lanes of a warp
// that do not all come to a shuffle.
#include <array>
#include <cstdint>
#include <functional>
#include <string>

namespace tierflow::testing::cuda {

// Calls kernel() once for each of `threads` threads, with threadIdx.x set. What is wrong with what they did, or
// nothing.
std::string run_block(const std::function<void()>& kernel, unsigned threads);

// Of the thread that runs; in run_block() alone.
void wait_for_block();
// Returns when all of `lanes`, of the thread's warp, have given theirs to an exchange of the same lanes.
const std::array<std::uint64_t, 32>& exchange(std::uint64_t value, unsigned lanes);

}  // namespace tierflow::testing::cuda
