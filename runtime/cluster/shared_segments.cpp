#include "runtime/cluster/shared_segments.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>

SharedSegments::SharedSegments() {
    char path[] = "/dev/shm/train_gpt.XXXXXX";
    if (!::mkdtemp(path)) return;
    path_ = path;
    ::setenv("OMPI_MCA_btl_vader_backing_directory", path, 0);
    ::setenv("OMPI_MCA_btl_sm_backing_directory", path, 0);
}

SharedSegments::~SharedSegments() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
}

void SharedSegments::clear() const {
    std::error_code ignored;
    if (path_.empty()) return;
    for (const auto& segment : std::filesystem::directory_iterator(path_, ignored))
        std::filesystem::remove_all(segment.path(), ignored);
}
