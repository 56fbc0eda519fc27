// The executor between plans: extents as its client reads, writes and saves them.
#include <utility>

#include "io/wait.h"
#include "swap/executor_impl.h"

namespace tierflow::swap {

void Executor::matches_store() {
  for (std::vector<char>& list : impl_->unsaved) list.assign(list.size(), false);
}

io::Error Executor::access(ExtentKind kind, int chunk, bool writes,
                           const std::function<void(std::span<std::byte>)>& use) {
  Impl& impl = *impl_;
  {
    std::lock_guard lock(impl.mutex);
    if (impl.error) return impl.error;  // the buffers may be gone with a drive that does not answer
  }
  if (const auto resident = impl.resident(kind, chunk); !resident.empty()) {
    use(resident);
    if (writes) impl.unsaved[static_cast<int>(kind)][chunk] = true;
    return {};
  }
  if (impl.arrangement.device_place(kind, chunk) != kNowhere) {
    const auto bytes = impl.host({HostRef::Where::state_buffer, 0}, impl.layout.chunks()[chunk].bytes(kind));
    if (!writes) {
      if (io::Error error = impl.copy_to_host(kind, chunk, bytes)) return error;
      use(bytes);
      return {};
    }
    use(bytes);
    impl.unsaved[static_cast<int>(kind)][chunk] = true;
    return impl.copy_to_device(kind, chunk, bytes);
  }
  const auto through = kind == ExtentKind::state ? HostRef::Where::state_buffer : HostRef::Where::word_buffer;
  std::vector<io::Buffer>& buffers = impl.buffers[index_of(through)];
  if (impl.store == nullptr || buffers.empty())
    return {
        .kind = io::ErrorKind::usage, .operation = "access", .detail = "the arrangement has no place for this extent"};
  io::Buffer& home = buffers.front();
  const auto bytes = home.bytes().first(impl.store->extent_bytes(kind, chunk));
  if (writes) {
    use(bytes);
    impl.store->stamp(kind, chunk, bytes);
  }
  const auto move = [&] {
    io::Completion completion = io::wait_for([&](io::Callback done) {
      if (writes)
        impl.store->write(kind, chunk, std::move(home), std::move(done));
      else
        impl.store->read(kind, chunk, std::move(home), std::move(done));
    });
    home = std::move(completion.buffer);
    std::lock_guard lock(impl.mutex);
    if (completion.error && !impl.error) impl.error = completion.error;
    return std::move(completion.error);
  };
  if (io::Error error = move(); error || writes) return error;
  if (const io::Error wrong = impl.store->verify(kind, chunk, bytes)) {
    impl.store->report_second_reading(wrong);
    if (io::Error error = move()) return error;
    if (io::Error again = impl.store->verify(kind, chunk, bytes)) return again;
  }
  use(bytes);
  return {};
}

io::Error Executor::write_back() {
  Impl& impl = *impl_;
  io::Error first;
  {
    std::lock_guard lock(impl.mutex);
    if (impl.error) return impl.error;
  }
  int outstanding = 0;
  for (const ExtentKind kind : {ExtentKind::hi, ExtentKind::state})
    for (int chunk = 0; chunk < static_cast<int>(impl.layout.chunks().size()); ++chunk) {
      const auto bytes = impl.resident(kind, chunk);
      if (bytes.empty() || !std::exchange(impl.unsaved[static_cast<int>(kind)][chunk], false)) continue;
      {
        std::unique_lock lock(impl.mutex);
        impl.client_wakes.wait(lock, [&] { return outstanding < kWritesBack; });
        if (first) break;
        ++outstanding;
      }
      impl.store->stamp(kind, chunk, bytes);
      impl.store->write(kind, chunk, impl.memory->lend(bytes), [&](io::Completion&& completion) {
        std::lock_guard lock(impl.mutex);
        if (completion.error && !first) first = std::move(completion.error);
        --outstanding;
        impl.client_wakes.notify_all();
      });
    }
  {
    std::unique_lock lock(impl.mutex);
    impl.client_wakes.wait(lock, [&] { return outstanding == 0; });
  }
  return first ? first : impl.write_back_from_device();
}

io::Error Executor::Impl::write_back_from_device() {
  for (const Chunk& chunk : layout.chunks()) {
    if (arrangement.device_place(ExtentKind::state, chunk.id) == kNowhere ||
        !std::exchange(unsaved[static_cast<int>(ExtentKind::state)][chunk.id], false))
      continue;
    io::Buffer& through = buffer({HostRef::Where::state_buffer, 0});
    const auto bytes = through.bytes().first(chunk.state_bytes);
    if (io::Error error = copy_to_host(ExtentKind::state, chunk.id, bytes)) return error;
    store->stamp(ExtentKind::state, chunk.id, bytes);
    io::Completion completion = io::wait_for(
        [&](io::Callback done) { store->write(ExtentKind::state, chunk.id, std::move(through), std::move(done)); });
    through = std::move(completion.buffer);
    if (completion.error) return std::move(completion.error);
  }
  return {};
}

// Between plans the lanes' streams are free.
io::Error Executor::Impl::copy_to_host(ExtentKind kind, int chunk, std::span<std::byte> to) {
  device.copy_to_host(StreamId::download, to.data(), arena.data() + arrangement.device_place(kind, chunk), to.size());
  return device.synchronize(device.record(StreamId::download));
}

io::Error Executor::Impl::copy_to_device(ExtentKind kind, int chunk, std::span<const std::byte> from) {
  device.copy_to_device(StreamId::upload, arena.data() + arrangement.device_place(kind, chunk), from.data(),
                        from.size());
  return device.synchronize(device.record(StreamId::upload));
}

}  // namespace tierflow::swap
