// Times training steps on command, as muster.benchmarks.servers asks for them.
//
//   serve_steps MODEL OPTIMIZER LR ROWS RANK ADDRESS COLUMN...     ADDRESS: host:port, or - without other workers
//
//   serve_steps --shapes MODEL                                     the sizes of each parameter
//
// Each line of standard input, "COLUMN STEPS", makes one untimed step and so many timed ones; a line with the
// milliseconds of each answers it. Ends with the input.
#include <chrono>
#include <iostream>
#include <sstream>

#include "columns.h"

namespace {

using Clock = std::chrono::steady_clock;

void print_shapes(const benchmark::Model& model) {
  for (const auto& parameter : model.build()->parameters()) {
    for (int64_t d = 0; d < parameter.dim(); ++d) std::cout << (d > 0 ? " " : "") << parameter.size(d);
    std::cout << '\n';
  }
}

void serve(const benchmark::Columns& columns) {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string column;
    int steps = 0;
    if (!(words >> column >> steps)) throw std::invalid_argument("'" + line + "' is not COLUMN STEPS");
    const auto& step = columns.step(column);
    step();
    for (int i = 0; i < steps; ++i) {
      const auto began = Clock::now();
      step();
      std::cout << std::chrono::duration<double, std::milli>(Clock::now() - began).count() << ' ';
    }
    std::cout << std::endl;
  }
  columns.check_agreement();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::vector<std::string> arguments(argv + 1, argv + argc);
    if (arguments.size() == 2 && arguments[0] == "--shapes") {
      print_shapes(benchmark::model_of(arguments[1]));
      return 0;
    }
    if (arguments.size() < 7) throw std::invalid_argument("MODEL OPTIMIZER LR ROWS RANK ADDRESS COLUMN...");
    at::set_num_threads(1);
    serve(benchmark::Columns({.model = benchmark::model_of(arguments[0]),
                              .optimizer = arguments[1],
                              .lr = std::stod(arguments[2]),
                              .rows = std::stoll(arguments[3]),
                              .rank = std::stoi(arguments[4]),
                              .address = arguments[5] == "-" ? "" : arguments[5]},
                             {arguments.begin() + 6, arguments.end()}));
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "serve_steps: " << error.what() << '\n';
    return 1;
  }
}
