#pragma once
// Where the random numbers of training come from. A layer that is computed again must draw what it drew the first time.
#include <ATen/core/Generator.h>
#include <torch/types.h>

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

namespace tierflow::models {

// Whose random numbers a model's forward draws when training.
enum class Draws : std::uint8_t {
  nothing,
  own,     // dropped() alone
  torchs,  // whatever draws from torch's default generators
};

// While one exists, what the calling thread draws begins at `seed`. Draws::own on the CPU: dropped() has a generator of
// the thread's own, so what other threads draw changes nothing. Else torch's default generators are used: other threads
// must not draw from them meanwhile, and they are put back at the end. One a thread.
class Seeded {
 public:
  Seeded(Draws draws, std::uint64_t seed, torch::Device device);
  ~Seeded();
  Seeded(const Seeded&) = delete;
  Seeded& operator=(const Seeded&) = delete;

 private:
  void seed_default(torch::Device device, std::uint64_t seed);

  // Default generators that were seeded, and the states that they had.
  std::vector<std::pair<at::Generator, torch::Tensor>> before_;
};

// x with elements zeroed with probability p, the others scaled by 1/(1-p), and the mask of those that stay: bits and
// derivative of at::native_dropout(). The mask depends on the seed, on what was drawn since, and on x's size alone.
// Where no Seeded says otherwise, it comes from torch's default generator.
std::tuple<torch::Tensor, torch::Tensor> dropped(const torch::Tensor& x, double p);

}  // namespace tierflow::models
