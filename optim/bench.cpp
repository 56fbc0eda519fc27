#include "optim/bench.h"

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <new>
#include <thread>

#include "optim/kernels.h"

namespace tierflow::optim {
namespace {

struct Freer {
  void operator()(void* p) const { ::operator delete (p, std::align_val_t{4096}); }
};

// Page-aligned bytes. Consecutive arrays begin at different cache sets.
class Bytes {
 public:
  explicit Bytes(std::size_t size, std::size_t skew)
      : memory_(::operator new (size + 4096, std::align_val_t{4096})), skew_(skew % 4096) {}
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(static_cast<char*>(memory_.get()) + skew_);
  }

 private:
  std::unique_ptr<void, Freer> memory_;
  std::size_t skew_;
};

std::size_t size_of(MomentFormat format) {
  return format == MomentFormat::block8 ? 1 : format == MomentFormat::bf16 ? 2 : 4;
}

// One thread's share of the parameters.
struct Slice {
  std::size_t n;
  MomentFormat moments;
  MasterFormat master;
  Bytes g, hi, lo, m, v, m_absmax, v_absmax;

  Slice(std::size_t count, MomentFormat moment_format, MasterFormat master_format)
      : n(count),
        moments(moment_format),
        master(master_format),
        g(2 * n, 0),
        hi(2 * n, 704),
        lo(2 * n, 1408),
        m(size_of(moments) * n, 2112),
        v(size_of(moments) * n, 2816),
        m_absmax(n / 64 + 64, 3520),
        v_absmax(n / 64 + 64, 128) {
    std::uint32_t random = 12345;
    for (std::size_t i = 0; i < n; ++i) {
      random = random * 1664525U + 1013904223U;
      g.as<std::uint16_t>()[i] = static_cast<std::uint16_t>((random >> 31 << 15) | (0x3980U + (random >> 16 & 0x1ffU)));
      hi.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(0x3c00U + (random >> 20 & 0xffU));
      lo.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(random >> 8);
    }
    zero_moment(state().m, n, true);
    zero_moment(state().v, n, false);
  }

  State state() const {
    const bool blocks = moments == MomentFormat::block8;
    return {master,
            hi.as<std::uint16_t>(),
            master == MasterFormat::split ? lo.as<std::uint16_t>() : nullptr,
            {moments, m.as<void>(), blocks ? m_absmax.as<float>() : nullptr},
            {moments, v.as<void>(), blocks ? v_absmax.as<float>() : nullptr}};
  }
};

// The pattern without the arithmetic, with the same prefetch.
template <class Moments>
void stream(const Slice& s) {
  constexpr std::size_t kChunk = 64;
  const auto* g = s.g.as<std::uint16_t>();
  auto* hi = s.hi.as<std::uint16_t>();
  auto* lo = s.lo.as<std::uint16_t>();
  auto* m = s.m.as<Moments>();
  auto* v = s.v.as<Moments>();
  const bool split = s.master == MasterFormat::split;
  for (std::size_t first = 0; first < s.n; first += kChunk) {
    for (std::size_t line = 0; line < 2 * kChunk; line += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(g + first) + 4096 + line);
      __builtin_prefetch(reinterpret_cast<const char*>(hi + first) + 4096 + line);
      if (split) __builtin_prefetch(reinterpret_cast<const char*>(lo + first) + 4096 + line);
    }
    for (std::size_t line = 0; line < sizeof(Moments) * kChunk; line += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(m + first) + 4096 + line);
      __builtin_prefetch(reinterpret_cast<const char*>(v + first) + 4096 + line);
    }
    for (std::size_t i = first; i < first + kChunk; ++i) hi[i] = static_cast<std::uint16_t>(hi[i] ^ (g[i] & 1));
    if (split)
      for (std::size_t i = first; i < first + kChunk; ++i) lo[i] = static_cast<std::uint16_t>(lo[i] + 1);
    for (std::size_t i = first; i < first + kChunk; ++i) m[i] = static_cast<Moments>(m[i] ^ 1);
    for (std::size_t i = first; i < first + kChunk; ++i) v[i] = static_cast<Moments>(v[i] ^ 1);
  }
}

void stream_slice(const Slice& s) {
  switch (s.moments) {
    case MomentFormat::block8:
      return stream<std::uint8_t>(s);
    case MomentFormat::bf16:
      return stream<std::uint16_t>(s);
    case MomentFormat::f32:
      return stream<std::uint32_t>(s);
  }
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

struct Case {
  const char* name;
  Rule rule;
  MomentFormat moments;
  MasterFormat master;
};

constexpr Case kCases[] = {
    {"adamw block8 hi/lo", Rule::adamw, MomentFormat::block8, MasterFormat::split},
    {"adamw f32 hi/lo", Rule::adamw, MomentFormat::f32, MasterFormat::split},
    {"adamw bf16 hi/lo", Rule::adamw, MomentFormat::bf16, MasterFormat::split},
    {"adamw block8 bf16-sr", Rule::adamw, MomentFormat::block8, MasterFormat::bf16_sr},
    {"adamw bf16 bf16-sr", Rule::adamw, MomentFormat::bf16, MasterFormat::bf16_sr},
    {"lion block8 hi/lo", Rule::lion, MomentFormat::block8, MasterFormat::split},
    {"sgd block8 hi/lo", Rule::sgd, MomentFormat::block8, MasterFormat::split},
};

}  // namespace

void bench_optimizer(const BenchOptions& options, const std::function<void(const BenchLine&)>& report) {
  const int threads = std::max(1, options.threads);
  const std::size_t share = std::max<std::size_t>(options.elements / threads / kBlock, 16) * kBlock;
  for (const Case& c : kCases) {
    std::vector<const Kernels*> sets;
    for (const Kernels& set : all_kernels()) {
      const std::string name = std::string(set.name) + " " + c.name;
      if (name.find(options.only) != std::string::npos && (std::string(set.name) != "SCALAR" || !options.only.empty()))
        sets.push_back(&set);
    }
    if (sets.empty()) continue;
    const int repeats = std::max(1, options.repeats);
    const std::size_t passes = sets.size() + 1;  // the stream, then each set
    std::vector<std::vector<double>> seconds(passes);
    std::barrier line(threads);
    const auto work = [&](int thread) {
      const Slice slice(share, c.moments, c.master);
      AdamWParams params;
      params.rule = c.rule;
      for (int repeat = -1; repeat < repeats; ++repeat)
        for (std::size_t pass = 0; pass < passes; ++pass) {
          params.step += 1;
          line.arrive_and_wait();
          const auto start = std::chrono::steady_clock::now();
          if (pass == 0)
            stream_slice(slice);
          else
            update_with(*sets[pass - 1], params, slice.g.as<std::uint16_t>(), slice.state(), slice.state(), slice.n);
          line.arrive_and_wait();
          const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
          if (thread == 0 && repeat >= 0) seconds[pass].push_back(taken.count());
        }
    };
    std::vector<std::jthread> team;
    for (int t = 1; t < threads; ++t) team.emplace_back(work, t);
    work(0);
    team.clear();

    const double mparam = static_cast<double>(share) * threads / 1e6;
    const bool uses_v = c.rule == Rule::adamw || c.rule == Rule::adam;
    for (std::size_t s = 0; s < sets.size(); ++s) {
      std::vector<double> shares;
      for (int r = 0; r < repeats; ++r) shares.push_back(seconds[0][r] / seconds[s + 1][r]);
      BenchLine result;
      result.name = std::string(sets[s]->name) + " " + c.name;
      result.mparam_s = mparam / median(seconds[s + 1]);
      result.best_mparam_s = mparam / *std::min_element(seconds[s + 1].begin(), seconds[s + 1].end());
      result.stream_share = median(shares);
      result.stream_mparam_s = mparam / median(seconds[0]);
      result.bytes_per_parameter =
          static_cast<int>(2 + (c.master == MasterFormat::split ? 8 : 4) + 2 * (uses_v ? 2 : 1) * size_of(c.moments));
      result.threads = threads;
      report(result);
    }
  }
}

std::string json_of(const BenchLine& line) {
  char text[512];
  std::snprintf(text, sizeof(text),
                "{\"name\": \"%s\", \"mparam_s\": %.1f, \"stream_share\": %.3f, \"best_mparam_s\": %.1f, "
                "\"stream_mparam_s\": %.1f, "
                "\"bytes_per_parameter\": %d, \"threads\": %d}",
                line.name.c_str(), line.mparam_s, line.stream_share, line.best_mparam_s, line.stream_mparam_s,
                line.bytes_per_parameter, line.threads);
  return text;
}

}  // namespace tierflow::optim
