#include "io/meter.h"

#include <algorithm>

namespace tierflow::io {
namespace {

Latency summary(const Histogram& histogram) {
  return Latency{.count = histogram.count(),
                 .p50 = histogram.percentile(0.50),
                 .p99 = histogram.percentile(0.99),
                 .longest = histogram.longest()};
}

}  // namespace

void Meter::start() {
  if (sums_.in_flight++ == 0) busy_since_ = Clock::now();
  sums_.peak_in_flight = std::max(sums_.peak_in_flight, sums_.in_flight);
}

void Meter::end(const Outcome& outcome) {
  sums_.retries += outcome.retries;
  if (outcome.transfer.action == Action::flush) {
    ++sums_.flushes;
    return flush_.add(outcome.elapsed);
  }
  if (--sums_.in_flight == 0) sums_.busy += Clock::now() - busy_since_;
  waited_ += outcome.elapsed;
  const bool reading = outcome.transfer.action == Action::read;
  (reading ? read_ : write_).add(outcome.elapsed);
  if (outcome.error) return;
  ++(reading ? sums_.reads : sums_.writes);
  (reading ? sums_.bytes_read : sums_.bytes_written) += outcome.transfer.bytes.size();
}

DriveStats Meter::stats() const {
  DriveStats stats = sums_;
  if (stats.in_flight != 0) stats.busy += Clock::now() - busy_since_;
  if (stats.busy.count() > 0) {
    stats.mean_in_flight = static_cast<double>(waited_.count()) / static_cast<double>(stats.busy.count());
  }
  stats.read_latency = summary(read_);
  stats.write_latency = summary(write_);
  stats.flush_latency = summary(flush_);
  return stats;
}

void DriveStats::add(const DriveStats& other) {
  const auto larger = [](Latency& mine, const Latency& theirs) {
    mine = {.count = mine.count + theirs.count,
            .p50 = std::max(mine.p50, theirs.p50),
            .p99 = std::max(mine.p99, theirs.p99),
            .longest = std::max(mine.longest, theirs.longest)};
  };
  bytes_read += other.bytes_read;
  bytes_written += other.bytes_written;
  reads += other.reads;
  writes += other.writes;
  flushes += other.flushes;
  retries += other.retries;
  in_flight += other.in_flight;
  peak_in_flight += other.peak_in_flight;
  mean_in_flight += other.mean_in_flight;
  busy = std::max(busy, other.busy);
  larger(read_latency, other.read_latency);
  larger(write_latency, other.write_latency);
  larger(flush_latency, other.flush_latency);
}

}  // namespace tierflow::io
