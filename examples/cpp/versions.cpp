// Prints what this program was compiled with and what it loads.
#include <muster/version.h>

#include <iostream>

int main() {
  std::cout << "muster " << muster::version() << " (headers " << MUSTER_VERSION << "), built with torch "
            << muster::built_with_torch() << "\n";
}
