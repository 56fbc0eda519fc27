// libFuzzer target for what strangers' files go through first: the first byte of the input chooses the parser. An
// Exception is the right answer to nonsense; anything else that leaves a parser is a defect.
#include <cstddef>
#include <cstdint>
#include <string>

#include "runtime/base/exception.h"
#include "runtime/base/strict_json.h"
#include "runtime/base/utf8.h"
#include "runtime/checkpoint/safetensors_header.h"
#include "runtime/spec/model_spec.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 3) return 0;
  const std::string text(reinterpret_cast<const char*>(data + 3), size - 3);
  try {
    if (data[0] % 3 == 0) tierflow::parse_safetensors_header(text, data[1] | data[2] << 8, "fuzz");
    if (data[0] % 3 == 1) tierflow::parse_model_spec(text, "fuzz");
    if (data[0] % 3 == 2) tierflow::find_invalid_utf8(text);
  } catch (const tierflow::Exception& error) {
    if (std::string(error.what()).find('\n') != std::string::npos) __builtin_trap();
  }
  return 0;
}
