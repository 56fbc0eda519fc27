#pragma once
// What the program and bindings/tierflow/prepare_rows.py say to each other.
#include <cstddef>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "runtime/data/data.h"
#include "runtime/data/python_process.h"

namespace tierflow {

// The folder of the options' tokenizer; empty where there is none.
std::filesystem::path tokenizer_folder(const DataOptions& options);

// The script, started. mode: its argument, or empty.
PythonProcess::Job rows_job(const DataOptions& options, const char* mode);

void send_json(PythonProcess& process, const nlohmann::ordered_json& value);

struct Frame {
  char kind;
  std::vector<std::byte> payload;
  nlohmann::ordered_json json() const;
};
// Throws Exception (kind input) where the frame is a failure.
Frame receive_frame(PythonProcess& process);

}  // namespace tierflow
