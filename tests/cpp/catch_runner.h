#pragma once

/// Runs the program's tests as its command line says; returns the exit status.
int run_tests(int argc, char** argv);
