#pragma once
// The messages between the program and bindings/tierflow/prepare_rows.py.
#include <cstddef>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "runtime/data/data.h"
#include "runtime/data/python_process.h"

namespace tierflow {

// The folder of the options' tokenizer; empty if there is none.
std::filesystem::path tokenizer_folder(const DataOptions& options);

// Starts the script. mode: its argument, or empty.
PythonProcess::Job rows_job(const DataOptions& options, const char* mode);

void send_json(PythonProcess& process, const nlohmann::ordered_json& value);

struct Frame {
  char kind;
  std::vector<std::byte> payload;
  nlohmann::ordered_json json() const;
};
// Throws Exception (kind input) if the frame reports a failure.
Frame receive_frame(PythonProcess& process);

}  // namespace tierflow
