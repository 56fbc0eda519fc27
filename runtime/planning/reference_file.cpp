#include "runtime/planning/reference_file.h"

#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <span>

#include "io/checksum.h"
#include "runtime/base/exception.h"
#include "runtime/base/files.h"
#include "runtime/spec/loss_rule.h"

namespace tierflow {
namespace {

namespace fs = std::filesystem;

constexpr std::array<char, 8> kMagic = {'T', 'F', 'R', 'E', 'F', 'E', 'R', '\n'};

struct Header {
  std::array<char, 8> magic = kMagic;
  std::uint64_t identity = 0, sequences = 0, hash = 0;
};
static_assert(sizeof(Header) == 32);

}  // namespace

void write_reference(const fs::path& path, const std::string& identity, const std::vector<double>& reference) {
  std::string bytes = identity;
  bytes.append(reinterpret_cast<const char*>(reference.data()), 8 * reference.size());
  const Header header{.identity = identity.size(),
                      .sequences = reference.size(),
                      .hash = io::content_hash(std::as_bytes(std::span(bytes)))};
  const File file = create_nameless(path.parent_path());
  write_exactly(file, path, std::as_bytes(std::span(&header, 1)));
  write_exactly(file, path, std::as_bytes(std::span(bytes)));
  name_file(file, path);
}

std::vector<double> read_reference(const fs::path& path, const std::string& identity,
                                   std::optional<std::int64_t> sequences) {
  const auto bad = [&](const std::string& what) {
    fail(io::ErrorKind::corruption, path.string(),
         what +
             ": the log-probabilities that the loss is relative to were computed before the first step and cannot be "
             "computed again; --fresh begins anew and discards the state");
  };
  if (std::error_code ignored; !fs::exists(path, ignored)) bad("is missing");
  const File file = open_regular(path);
  const std::uint64_t size = file_size(file, path);
  Header header;
  if (size < sizeof header) bad("is damaged");
  read_exactly(file, path, 0, std::as_writable_bytes(std::span(&header, 1)));
  std::string bytes(size - sizeof header, '\0');
  read_exactly(file, path, sizeof header, std::as_writable_bytes(std::span(bytes.data(), bytes.size())));
  if (header.magic != kMagic || header.hash != io::content_hash(std::as_bytes(std::span(bytes))) ||
      bytes.size() < header.identity || bytes.size() - header.identity != 8 * header.sequences)
    bad("is damaged");
  if (bytes.substr(0, header.identity) != identity ||
      (sequences && header.sequences != static_cast<std::uint64_t>(*sequences)))
    bad("is of another run");
  std::vector<double> reference(header.sequences);
  std::memcpy(reference.data(), bytes.data() + header.identity, 8 * reference.size());
  return reference;
}

void verify_reference(const Folders& storage, const LeftStore& left) {
  // Before the first step it is computed anew.
  if (left.streamed || left.step == 0 || !is_of_train(left.run)) return;
  const auto run = nlohmann::json::parse(left.run);
  const auto loss = run.find("loss");
  if (loss == run.end() || !loss->is_string() || run.contains("reference")) return;
  if (LossRule{.kind = parse_loss(loss->get<std::string>())}.needs_reference())
    read_reference(reference_beside(storage), left.run, std::nullopt);
}

}  // namespace tierflow
