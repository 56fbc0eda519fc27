#include "runtime/stream/stream_state.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <optional>

#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/base/strict_json.h"
#include "runtime/checkpoint/safetensors_header.h"

namespace tierflow {
namespace {

// hi first, then what the state holds, in its order.
std::vector<StatePart> parts_of(const StateFormat& format) {
  std::vector<StatePart> parts = state_parts(format);
  parts.insert(parts.begin(), kWordPart);
  return parts;
}

// Where the parts of every trained tensor lie in the file.
class StateFile {
 public:
  StateFile(const swap::Layout& layout, const PackedModel& packed, const std::vector<UnitSpec>& units)
      : packed_(packed) {
    for (std::size_t unit = 0; unit < units.size(); ++unit) {
      first_.push_back(offsets_.size());
      offsets_.resize(offsets_.size() + units[unit].tensors.size());
      for (const swap::Chunk& chunk : layout.trainable_chunks_of(static_cast<int>(unit)))
        for (const TensorPiece& piece : pieces_of(packed, chunk))
          if (piece.in_tensor == 0) add(units[unit].tensors[piece.tensor->tensor], chunk, *piece.tensor);
    }
  }

  std::uint64_t bytes() const { return bytes_; }

  std::string header() const {
    Json header;
    header["__metadata__"] = {{"format", "tierflow-state"}, {"precision", precision_name(packed_.precision)}};
    for (const HeaderEntry& entry : entries_)
      header[entry.name] = {{"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {entry.begin, entry.end}}};
    std::string text = header.dump();
    text.append((8 - text.size() % 8) % 8, ' ');
    return text;
  }

  // Takes the offsets of a file that holds exactly these tensors.
  void match(const std::vector<HeaderEntry>& found, const std::string& where) {
    std::map<std::string, const HeaderEntry*> by_name;
    for (const HeaderEntry& entry : found) by_name[entry.name] = &entry;
    for (const HeaderEntry& entry : entries_) {
      const auto at = by_name.find(entry.name);
      if (at == by_name.end())
        fail_input(where, "has no " + entry.name + ": it belongs to another model, or to other trained parameters");
      if (at->second->dtype != entry.dtype || at->second->shape != entry.shape)
        fail_input(where, entry.name + " has another type or shape there: it belongs to another model");
    }
    if (found.size() != entries_.size())
      fail_input(where, "has tensors that this model does not train: it belongs to another model");
    for (std::size_t i = 0; i < entries_.size(); ++i)
      offsets_[places_[i].first][places_[i].second] = by_name[entries_[i].name]->begin;
  }

  // Calls use(bytes of a part of a tensor in this chunk, their offset behind the file's header). hi or state: the
  // extents' bytes; the other is empty.
  template <class Use>
  void each_part(const swap::Chunk& chunk, std::span<std::byte> hi, std::span<std::byte> state, Use use) const {
    const StateFormat& format = packed_.units[chunk.unit].formats[chunk.group];
    const std::vector<StatePart> parts = parts_of(format);
    for (const TensorPiece& piece : pieces_of(packed_, chunk)) {
      std::uint64_t in_state = 0;
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const StatePart& part = parts[i];
        const std::uint64_t size = part.size(piece.elements);
        const std::uint64_t from = in_state + part.bytes * (piece.in_chunk / part.each);
        const std::span<std::byte> bytes = i == 0 ? hi : state;
        if (i != 0) in_state += part.bytes * (chunk.elements / part.each);
        if (bytes.empty()) continue;
        use(bytes.subspan(i == 0 ? part.bytes * piece.in_chunk : from, size),
            offsets_[first_[chunk.unit] + piece.tensor->tensor][i] + part.bytes * (piece.in_tensor / part.each));
      }
    }
  }

 private:
  void add(const TensorSpec& spec, const swap::Chunk& chunk, const PackedTensor& tensor) {
    for (const StatePart& part : parts_of(packed_.units[chunk.unit].formats[chunk.group])) {
      const std::uint64_t size = part.size(tensor.elements);
      entries_.push_back(
          {.name = spec.name + part.suffix,
           .dtype = part.dtype,
           .shape = part.each == 1 ? spec.shape : std::vector<std::int64_t>{std::int64_t(size / part.bytes)},
           .begin = bytes_,
           .end = bytes_ + size});
      std::vector<std::uint64_t>& parts = offsets_[first_[chunk.unit] + tensor.tensor];
      places_.emplace_back(first_[chunk.unit] + tensor.tensor, parts.size());
      parts.push_back(bytes_);
      bytes_ += size;
    }
  }

  const PackedModel& packed_;
  std::vector<HeaderEntry> entries_;
  std::vector<std::pair<std::size_t, std::size_t>> places_;  // of the entries in offsets_
  std::vector<std::vector<std::uint64_t>> offsets_;          // by tensor of all units, a part each
  std::vector<std::size_t> first_;                           // by unit
  std::uint64_t bytes_ = 0;
};

template <class Use>
void each_chunk(const swap::Layout& layout, const char* what, const Progress& progress, Use use) {
  std::uint64_t done = 0, total = 0;
  for (const swap::Chunk& chunk : layout.chunks()) total += chunk.trainable ? chunk.elements : 0;
  for (int id = 0; id < static_cast<int>(layout.chunks().size()); ++id) {
    const swap::Chunk& chunk = layout.chunks()[id];
    if (!chunk.trainable) continue;
    for (const auto kind : {swap::ExtentKind::hi, swap::ExtentKind::state}) use(id, chunk, kind);
    done += chunk.elements;
    if (progress) progress(what, done, total);
  }
}

}  // namespace

void save_stream_state(StreamedState& state, const std::filesystem::path& path, const Progress& progress) {
  swap::Executor& executor = state.executor();
  const swap::Layout& layout = state.layout();
  const PackedModel& packed = state.packed();
  const StateFile plan(layout, packed, state.units());
  const std::string header = plan.header();
  if (header.size() > safetensors_header_limit)
    fail(io::ErrorKind::usage, path.string(), "the model has too many tensors");
  const std::uint64_t length = header.size(), data = sizeof length + header.size();
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  if (free_space(folder) < data + plan.bytes())
    fail(io::ErrorKind::environment, folder.string(),
         "has too little free space: the state takes " + std::to_string((data + plan.bytes()) >> 20) + " MiB");
  replace_file(path, 0644, [&](const File& file, const std::filesystem::path& temporary) {
    write_exactly(file, temporary, std::as_bytes(std::span(&length, 1)), 0);
    write_exactly(file, temporary, std::as_bytes(std::span(header.data(), header.size())), sizeof length);
    each_chunk(layout, "saving state", progress, [&](int id, const swap::Chunk& chunk, swap::ExtentKind kind) {
      throw_if(executor.access(kind, id, false, [&](std::span<std::byte> bytes) {
        const bool hi = kind == swap::ExtentKind::hi;
        plan.each_part(
            chunk, hi ? bytes : std::span<std::byte>(), hi ? std::span<std::byte>() : bytes,
            [&](std::span<std::byte> part, std::uint64_t at) { write_exactly(file, temporary, part, data + at); });
      }));
    });
    if (fsync(file.fd()) != 0) fail_system("flush", temporary.string(), errno);
    posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);  // of flushed pages alone
  });
  sync_folder(folder);
}

void load_stream_state(StreamedState& state, const std::filesystem::path& path, const Progress& progress) {
  swap::Executor& executor = state.executor();
  const swap::Layout& layout = state.layout();
  const PackedModel& packed = state.packed();
  StateFile plan(layout, packed, state.units());
  const File file = open_regular(path);
  const std::uint64_t size = file_size(file, path);
  std::uint64_t length = 0;
  if (size < sizeof length) fail_input(path.string(), "is no safetensors file: too short");
  read_exactly(file, path, 0, std::as_writable_bytes(std::span(&length, 1)));
  if (length > safetensors_header_limit || length > size - sizeof length)
    fail_input(path.string(), "is no safetensors file, or was cut off: its header does not fit it");
  std::string header(length, ' ');
  read_exactly(file, path, sizeof length, std::as_writable_bytes(std::span(header.data(), header.size())));
  const std::uint64_t data = sizeof length + length;
  const auto found = parse_safetensors_header(header, size - data, path.string());
  const Json metadata = parse_json(header, path.string(), 8).value("__metadata__", Json::object());
  const std::string precision = metadata.value("precision", "");
  if (metadata.value("format", "") != "tierflow-state")
    fail_input(path.string(), "holds no training state of Tierflow");
  if (precision != precision_name(packed.precision))
    fail_input(path.string(), "was saved in precision " + printable(precision) + ", and this run has " +
                                  precision_name(packed.precision));
  plan.match(found, path.string());
  each_chunk(layout, "loading state", progress, [&](int id, const swap::Chunk& chunk, swap::ExtentKind kind) {
    // An extent is written whole: padding comes from a copy.
    std::vector<std::byte> copy;
    throw_if(
        executor.access(kind, id, false, [&](std::span<std::byte> bytes) { copy.assign(bytes.begin(), bytes.end()); }));
    const bool hi = kind == swap::ExtentKind::hi;
    plan.each_part(chunk, hi ? std::span(copy) : std::span<std::byte>(), hi ? std::span<std::byte>() : std::span(copy),
                   [&](std::span<std::byte> part, std::uint64_t at) { read_exactly(file, path, data + at, part); });
    throw_if(executor.access(
        kind, id, true, [&](std::span<std::byte> bytes) { std::copy_n(copy.begin(), bytes.size(), bytes.begin()); }));
  });
}

}  // namespace tierflow
