#include "runtime/checkpoint/safetensors.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <fstream>

#include "runtime/checkpoint/init.h"
#include "runtime/checkpoint/packed_weight.h"
#include "runtime/checkpoint/source_folder.h"
#include "runtime/spec/model_spec.h"
#include "support/temp_dir.h"
#include "tests/runtime/expect.h"

namespace tierflow {
namespace {

namespace fs = std::filesystem;
using testing::expect_refusal;
using testing::write_file;

std::string packed(const std::string& header, std::size_t data_bytes) {
  const std::uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + header + std::string(data_bytes, '\x01');
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + shape + "],\"data_offsets\":[" + offsets + "]}";
}

void refused(const std::string& file, std::initializer_list<std::string_view> words) {
  testing::TempDir dir;
  write_file(dir.path() / "model.safetensors", file);
  expect_refusal(io::ErrorKind::input, words, [&] { Checkpoint::open(dir.path()); });
}

std::size_t entries_in(const fs::path& folder) {
  return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

std::vector<std::byte> bf16_bytes(std::size_t elements, std::uint64_t seed) {
  std::vector<float> values(elements);
  initial_values({.name = "x", .shape = {1}}, seed, 0, values);
  std::vector<std::byte> bytes(2 * elements);
  for (std::size_t i = 0; i < elements; ++i) {
    const std::uint16_t half = to_bf16(values[i]);
    std::memcpy(bytes.data() + 2 * i, &half, 2);
  }
  return bytes;
}

TEST(Safetensors, WritesWhatItReads) {
  for (const std::uint64_t shard : {std::uint64_t{1} << 30, std::uint64_t{300}, std::uint64_t{1}}) {
    testing::TempDir dir;
    const fs::path folder = dir.path() / "new" / "model";
    const std::vector<TensorHeader> headers = {{.name = "b", .shape = {10, 20}},
                                               {.name = "a", .dtype = Dtype::f32, .shape = {7}},
                                               {.name = "empty", .shape = {0, 3}},
                                               {.name = "s", .dtype = Dtype::f16, .shape = {}}};
    const auto b = bf16_bytes(200, 1);
    const std::vector<float> a = {1, -2, 3, -4, 5e-40f, 6, NAN};
    const std::uint16_t half = 0x0001;  // the smallest f16
    {
      CheckpointWriter writer(folder, headers, shard);
      writer.write(std::span(b).first(33));
      writer.write(std::span(b).subspan(33));
      writer.write(std::as_bytes(std::span(a)));
      writer.write(std::as_bytes(std::span(&half, 1)));
      EXPECT_FALSE(fs::exists(folder / "model.safetensors"));
      writer.finish();
    }
    const auto model = Checkpoint::open(folder);
    EXPECT_EQ(model.tensors().size(), 4u);
    EXPECT_EQ(model.files().size(), shard == 1 ? 3u : shard == 300 ? 2u : 1u);
    std::vector<float> out(50);
    model.read_f32("b", 150, out);
    for (std::size_t i = 0; i < out.size(); ++i) {
      const auto want = static_cast<std::uint32_t>(std::to_integer<unsigned>(b[300 + 2 * i]) |
                                                   std::to_integer<unsigned>(b[301 + 2 * i]) << 8)
                        << 16;
      EXPECT_EQ(std::memcmp(&want, &out[i], 4), 0);
    }
    model.read_f32("a", 0, std::span(out).first(7));
    EXPECT_EQ(std::memcmp(a.data(), out.data(), 28), 0);
    model.read_f32("s", 0, std::span(out).first(1));
    EXPECT_EQ(out[0], 0x1p-24f);
    expect_refusal(io::ErrorKind::input, {"no tensor", "nope"}, [&] { model.read_f32("nope", 0, out); });
    expect_refusal(io::ErrorKind::usage, {"which has 7"}, [&] { model.read_f32("a", 0, out); });
  }
}

TEST(Safetensors, EveryHalfIsConvertedExactly) {
  testing::TempDir dir;
  std::vector<std::uint16_t> halves(65536);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  CheckpointWriter writer(dir.path(), {{.name = "h", .dtype = Dtype::f16, .shape = {65536}}});
  writer.write(std::as_bytes(std::span(halves)));
  writer.finish();
  std::vector<float> out(65536);
  Checkpoint::open(dir.path()).read_f32("h", 0, out);
  for (std::size_t i = 0; i < halves.size(); ++i) {
    const int exponent = static_cast<int>(i >> 10 & 31), mantissa = static_cast<int>(i & 1023);
    const double sign = i >> 15 ? -1 : 1;
    if (exponent == 31) {
      EXPECT_EQ(std::isnan(out[i]), mantissa != 0);
      continue;
    }
    EXPECT_EQ(out[i], sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25)))
        << i;
  }
}

TEST(Safetensors, AnUnfinishedWriterLeavesNothing) {
  testing::TempDir dir;
  const fs::path folder = dir.path() / "model";
  {
    CheckpointWriter writer(folder, {{.name = "a", .shape = {100}}, {.name = "b", .shape = {100}}}, 200);
    writer.write(bf16_bytes(150, 1));
    expect_refusal(io::ErrorKind::usage, {"b", "to its end"}, [&] { writer.finish(); });
  }
  EXPECT_FALSE(fs::exists(folder));
}

TEST(Safetensors, AFinishedWriterReplacesAnOlderModel) {
  testing::TempDir dir;
  const auto write = [&](std::uint64_t shard) {
    CheckpointWriter writer(dir.path(), {{.name = "a", .shape = {100}}, {.name = "b", .shape = {100}}}, shard);
    writer.write(bf16_bytes(200, shard));
    writer.finish();
  };
  write(200);
  EXPECT_EQ(entries_in(dir.path()), 3u);
  write(1000);
  EXPECT_EQ(entries_in(dir.path()), 1u);
  EXPECT_EQ(Checkpoint::open(dir.path()).files().size(), 1u);
  write(200);
  EXPECT_EQ(entries_in(dir.path()), 3u);
  EXPECT_EQ(Checkpoint::open(dir.path()).files().size(), 2u);
}

TEST(Safetensors, AWriterRefusesWhatCannotBeWritten) {
  testing::TempDir dir;
  const auto make = [&](std::vector<TensorHeader> headers) { CheckpointWriter(dir.path() / "x", std::move(headers)); };
  expect_refusal(io::ErrorKind::environment, {"GiB free"},
                 [&] { make({{.name = "a", .shape = {std::int64_t{1} << 50}}}); });
  expect_refusal(io::ErrorKind::usage, {"shape"}, [&] {
    make({{.name = "a", .shape = {std::int64_t{1} << 40, std::int64_t{1} << 40}}});
  });
  expect_refusal(io::ErrorKind::usage, {"twice"}, [&] {
    make({{.name = "a", .shape = {1}}, {.name = "a", .shape = {1}}});
  });
  EXPECT_EQ(entries_in(dir.path()), 0u);
  write_file(dir.path() / "file", "");
  expect_refusal(io::ErrorKind::input, {"file"}, [&] { CheckpointWriter(dir.path() / "file" / "x", {}); });
}

TEST(Safetensors, HostileHeadersAreRefused) {
  const std::string a = entry("a", "F32", "2", "0,8");
  refused("", {"0 bytes"});
  refused("1234567", {"7 bytes"});
  refused(packed("", 0), {"header"});
  refused(std::string(8, '\xff') + "{}", {"header", "18446744073709551615"});
  refused(std::string("\x00\x00\x00\x40\x00\x00\x00\x00{}", 10), {"1073741824"});
  refused(packed("[]", 0), {"does not start with {"});
  refused(packed(" {}", 0), {"does not start with {"});
  refused(packed("{" + a + "}", 7), {"truncated"});
  refused(packed("{" + a + "}", 9), {"longer"});
  refused(packed("{" + a, 8), {"JSON"});
  refused(packed("{" + a + "}" + std::string(4, '\0'), 8), {"JSON"});
  refused(packed("{" + a + "," + a + "}", 8), {"twice", "a"});
  refused(packed("{" + a + "," + entry("b", "F32", "2", "4,12") + "}", 12), {"\"b\"", "overlap"});
  refused(packed("{" + a + "," + entry("b", "F32", "1", "12,16") + "}", 16), {"\"b\"", "hole"});
  refused(packed("{" + entry("a", "F32", "2", "8,0") + "}", 8), {"\"a\"", "backwards"});
  refused(packed("{" + entry("a", "F32", "2", "0,18446744073709551615") + "}", 8), {"\"a\"", "data_offsets"});
  refused(packed("{" + entry("a", "F32", "3", "0,8") + "}", 8), {"\"a\"", "12"});
  refused(packed("{" + entry("a", "F32", "4294967296,4294967296,4", "0,8") + "}", 8), {"\"a\"", "overflow"});
  refused(packed("{" + entry("a", "F32", "-2", "0,8") + "}", 8), {"\"a\"", "shape"});
  refused(packed("{" + entry("a", "F32", "2.0", "0,8") + "}", 8), {"\"a\"", "shape"});
  refused(packed("{" + entry("a", "F32", "\"2\"", "0,8") + "}", 8), {"\"a\"", "shape"});
  refused(packed("{" + entry("a", "F32", "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,2", "0,8") + "}", 8), {"dimensions"});
  refused(packed("{" + entry("a", "Q7", "2", "0,8") + "}", 8), {"\"a\"", "Q7"});
  refused(packed("{" + entry("a", "F4", "1", "0,0") + "}", 0), {"\"a\""});
  refused(packed("{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8), {"\"a\"", "data_offsets"});
  refused(packed("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8],\"x\":1}}", 8), {"\"a\"", "x"});
  refused(packed("{\"a\":[]}", 0), {"\"a\""});
  refused(packed("{\"\":" + a.substr(4) + "}", 8), {"empty"});
  refused(packed("{\"__metadata__\":{\"k\":1}}", 0), {"__metadata__"});
  refused(packed("{\"__metadata__\":[]}", 0), {"__metadata__"});
  refused(packed("{\"a\":" + std::string(1000, '['), 0), {"deep"});
  refused(packed("{\"\xff\":1}", 0), {"JSON"});
  refused(packed("{\"a\nb\x1b[31m\":[]}", 0), {"JSON"});
}

TEST(Safetensors, EveryTypeOfTheFormatHasItsSize) {
  for (const auto& [dtype, bits] :
       {std::pair{"F4", 4}, {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"BOOL", 8}, {"U8", 8},   {"I8", 8},    {"F8_E5M2", 8},
        {"F8_E4M3", 8},     {"F8_E8M0", 8}, {"I16", 16},    {"U16", 16}, {"F16", 16}, {"BF16", 16}, {"I32", 32},
        {"U32", 32},        {"F32", 32},    {"I64", 64},    {"U64", 64}, {"F64", 64}, {"C64", 64},  {"C128", 128}}) {
    const auto bytes = static_cast<std::size_t>(bits);  // of eight elements
    testing::TempDir dir;
    write_file(dir.path() / "model.safetensors",
               packed("{" + entry("a", dtype, "8", "0," + std::to_string(bytes)) + "}", bytes));
    const auto model = Checkpoint::open(dir.path());
    EXPECT_EQ(model.stored().at("a").dtype, dtype);
    EXPECT_EQ(model.stored().at("a").bytes, bytes);
    if (std::string_view(dtype) != "F32" && !std::string_view(dtype).ends_with("F16")) {
      std::vector<float> out(8);
      expect_refusal(io::ErrorKind::input, {"\"a\"", std::string("as ") + dtype + ";", "F32, BF16 and F16 are read"},
                     [&] { model.read_f32("a", 0, out); });
    }
    refused(packed("{" + entry("a", dtype, "8", "0," + std::to_string(bytes + 1)) + "}", bytes + 1), {"\"a\"", "take"});
  }
  // Less than a byte each: as many as fill whole bytes.
  refused(packed("{" + entry("a", "F4", "1", "0,1") + "}", 1), {"\"a\"", "take"});
}

TEST(Safetensors, LimitsOfHeadersAndIndices) {
  const auto opens = [](const std::string& file) {
    testing::TempDir dir;
    write_file(dir.path() / "model.safetensors", file);
    Checkpoint::open(dir.path());
  };
  const std::string ones = "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1", longest(1024, 'n');
  EXPECT_NO_THROW(opens(packed("{" + entry("a", "U8", ones + ",2", "0,2") + "}", 2)));
  refused(packed("{" + entry("a", "U8", ones + ",1,2", "0,2") + "}", 2), {"more than 16 dimensions"});
  EXPECT_NO_THROW(opens(packed("{" + entry(longest, "U8", "2", "0,2") + "}", 2)));
  refused(packed("{" + entry(longest + "n", "U8", "2", "0,2") + "}", 2), {"longer than 1024 bytes"});
  refused(packed("{" + std::string(9, ' '), 0), {"JSON"});
  testing::TempDir dir;
  const auto index = [&](int files) {
    std::string map;
    for (int i = 0; i < files; ++i)
      map += (i == 0 ? "\"" : ",\"") + std::to_string(i) + "\":\"" + std::to_string(i) + ".safetensors\"";
    write_file(dir.path() / "model.safetensors.index.json", "{\"weight_map\":{" + map + "}}");
    Checkpoint::open(dir.path());
  };
  expect_refusal(io::ErrorKind::input, {"names 4097 files, more than 4096"}, [&] { index(4097); });
  expect_refusal(io::ErrorKind::input, {"0.safetensors", "open"}, [&] { index(4096); });
}

TEST(Safetensors, ForeignFilesAreNamed) {
  refused(std::string("PK\x03\x04", 4) + std::string(100, 'x'), {"zip", "pickle"});
  refused("\x80\x02}q\x01." + std::string(100, 'x'), {"a pickle"});
  refused("GGUF\x03" + std::string(100, 'x'), {"GGUF"});
  refused("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", {"LFS"});
  refused("<!DOCTYPE html><html>", {"HTML"});
  const auto folder_with = [](const char* name, std::initializer_list<std::string_view> words) {
    testing::TempDir dir;
    write_file(dir.path() / name, "x");
    expect_refusal(io::ErrorKind::input, words, [&] { Checkpoint::open(dir.path()); });
  };
  folder_with("pytorch_model.bin", {"pickle", "safe_serialization"});
  folder_with("model.pt", {"pickle"});
  folder_with("model.Q4.gguf", {"GGUF"});
  folder_with("other.safetensors", {"other.safetensors"});
  folder_with("readme.md", {"not a Hugging Face model folder"});
  expect_refusal(io::ErrorKind::input, {"does not exist"}, [] { Checkpoint::open("/nonexistent/model"); });
  expect_refusal(io::ErrorKind::input, {"not a folder"}, [] { Checkpoint::open("/dev/null"); });
}

TEST(Safetensors, AnIndexStaysInItsFolder) {
  testing::TempDir dir;
  const fs::path folder = dir.path() / "model";
  const std::string good = packed("{" + entry("a", "F32", "2", "0,8") + "}", 8);
  write_file(dir.path() / "outside.safetensors", good);
  write_file(folder / "in.safetensors", good);
  const auto with_index = [&](const std::string& text, std::initializer_list<std::string_view> words) {
    write_file(folder / "model.safetensors.index.json", text);
    expect_refusal(io::ErrorKind::input, words, [&] { Checkpoint::open(folder); });
  };
  const auto mapping = [](const std::string& file) { return "{\"weight_map\":{\"a\":\"" + file + "\"}}"; };
  with_index(mapping("../outside.safetensors"), {"outside the model's folder"});
  with_index(mapping((dir.path() / "outside.safetensors").string()), {"outside the model's folder"});
  with_index(mapping("..\\u002foutside.safetensors"), {"outside the model's folder"});
  with_index(mapping("in.bin"), {"not a .safetensors"});
  with_index(mapping(".."), {"not a .safetensors"});
  with_index(mapping("in.safetensors\\u0000.safetensors"), {"plain name"});
  with_index(mapping("gone.safetensors"), {"gone.safetensors"});
  with_index("{\"weight_map\":{\"zz\":\"in.safetensors\"}}", {"lacks", "zz"});
  with_index("{\"weight_map\":{\"a\":7}}", {"in no file"});
  with_index("{\"weight_map\":{}}", {"weight_map"});
  with_index("{\"weight_map\":{\"a\":\"in.safetensors\",\"a\":\"x.safetensors\"}}", {"twice"});
  with_index("[]", {"weight_map"});
  fs::create_symlink("../outside.safetensors", folder / "link.safetensors");
  with_index(mapping("link.safetensors"), {"symbolic link"});
  fs::create_symlink("/dev/zero", folder / "device.safetensors");
  with_index(mapping("device.safetensors"), {"symbolic link"});
  ASSERT_EQ(mkfifo((folder / "pipe.safetensors").c_str(), 0600), 0);
  with_index(mapping("pipe.safetensors"), {"not a regular file"});
  fs::create_directory(folder / "dir.safetensors");
  with_index(mapping("dir.safetensors"), {"folder"});
  fs::create_symlink("in.safetensors", folder / "inside.safetensors");
  write_file(folder / "model.safetensors.index.json", mapping("inside.safetensors"));
  EXPECT_EQ(Checkpoint::open(folder).tensors().size(), 1u);
}

TEST(Safetensors, TheHuggingFaceCacheLayoutIsFollowed) {
  testing::TempDir dir;
  const fs::path cache = dir.path() / "models--x", snapshot = cache / "snapshots" / "abc";
  write_file(cache / "blobs" / "123", packed("{" + entry("a", "F32", "2", "0,8") + "}", 8));
  write_file(dir.path() / "elsewhere", "x");
  fs::create_directories(snapshot);
  fs::create_symlink("../../blobs/123", snapshot / "model.safetensors");
  EXPECT_EQ(Checkpoint::open(snapshot).tensors().size(), 1u);
  fs::remove(snapshot / "model.safetensors");
  fs::create_symlink("../../../elsewhere", snapshot / "model.safetensors");
  expect_refusal(io::ErrorKind::input, {"symbolic link"}, [&] { Checkpoint::open(snapshot); });
}

TEST(Safetensors, AFileThatShrinksIsAnErrorNotASignal) {
  testing::TempDir dir;
  write_file(dir.path() / "model.safetensors", packed("{" + entry("a", "F32", "2", "0,8") + "}", 8));
  const auto model = Checkpoint::open(dir.path());
  fs::resize_file(dir.path() / "model.safetensors", 20);
  std::vector<float> out(2);
  expect_refusal(io::ErrorKind::corruption, {"shorter"}, [&] { model.read_f32("a", 0, out); });
}

TEST(Safetensors, ACheckpointMustFitItsConfig) {
  const ModelSpec spec = parse_model_spec(
      R"({"architectures":["GPT2LMHeadModel"],"vocab_size":4,"n_embd":2,"n_layer":1,"n_head":1,"n_positions":3})",
      "config.json");
  const auto model = [&](const std::function<void(std::vector<TensorHeader>&)>& change, const testing::TempDir& dir) {
    std::vector<TensorHeader> headers;
    for (const auto& unit : spec.units)
      for (const auto& tensor : unit.tensors) headers.push_back({.name = tensor.name, .shape = tensor.shape});
    change(headers);
    CheckpointWriter writer(dir.path(), headers);
    for (const auto& header : headers) {
      std::size_t elements = 1;
      for (const auto size : header.shape) elements *= static_cast<std::size_t>(size);
      writer.write(bf16_bytes(elements, 1));
    }
    writer.finish();
    return Checkpoint::open(dir.path());
  };
  testing::TempDir dir;
  EXPECT_NO_THROW(check_tensors(spec, model([](auto&) {}, dir)));
  const auto old_names = model(
      [](auto& headers) {
        for (auto& header : headers) header.name.erase(0, std::string("transformer.").size());
        headers.push_back({.name = "h.0.attn.bias", .shape = {1, 1, 3, 3}});
        headers.push_back({.name = "lm_head.weight", .shape = {4, 2}});
      },
      dir);
  EXPECT_NO_THROW(check_tensors(spec, old_names));
  std::vector<float> out(8);
  EXPECT_NO_THROW(old_names.read_f32("transformer.wte.weight", 0, out));
  expect_refusal(io::ErrorKind::input, {"transformer.wte.weight has shape [5, 2], not [4, 2]"}, [&] {
    check_tensors(spec, model([](auto& headers) { headers[0].shape = {5, 2}; }, dir));
  });
  expect_refusal(io::ErrorKind::input, {"ln_f.bias is missing", "surprise is not a parameter"},
                 [&] { check_tensors(spec, model([](auto& headers) { headers.back().name = "surprise"; }, dir)); });
  expect_refusal(io::ErrorKind::input, {"and 6 more"},
                 [&] { check_tensors(spec, model([](auto& headers) { headers.clear(); }, dir)); });
}

}  // namespace
}  // namespace tierflow
