// What a client of the executor need not be able to do.
#include "swap/executor.h"

namespace tierflow::swap {

namespace {
io::Error keeps_no_sums() {
  return {.kind = io::ErrorKind::usage, .operation = "update", .detail = "this run keeps no gradient sums"};
}
}  // namespace

io::Error UpdateWork::update_on_device(const Chunk&, Device&, const DeviceUpdate&) {
  return {.kind = io::ErrorKind::usage, .operation = "update", .detail = "this run's updates are the host's alone"};
}
io::Error UpdateWork::keep_gradient(const Chunk&, Device&, const DeviceUpdate&) {
  return {.kind = io::ErrorKind::usage, .operation = "measure", .detail = "this run's updates are the host's alone"};
}
void UpdateWork::enqueue_measuring(const Chunk&, Device&, StreamId, const std::uint16_t*, std::byte*) {}
io::Error UpdateWork::take_measured(const Chunk&, std::span<const std::byte>) {
  return {};
}
io::Error UpdateWork::catch_up(const Chunk&, std::span<std::byte>, std::span<std::byte>) {
  return {.kind = io::ErrorKind::usage, .operation = "update", .detail = "this run's chunks miss no updates"};
}
io::Error UpdateWork::accumulate(const Chunk&, std::span<const std::byte>, std::span<std::byte>, std::span<std::byte>,
                                 bool) {
  return keeps_no_sums();
}
io::Error UpdateWork::round_sum(const Chunk&, std::span<std::byte>, std::span<const std::byte>) {
  return keeps_no_sums();
}

}  // namespace tierflow::swap
