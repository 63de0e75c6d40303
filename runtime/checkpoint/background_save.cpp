
#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "kernels/base/check.h"
#include "runtime/checkpoint/save.h"
#include "runtime/io/process.h"

// The state of one save, shared by the training thread and the thread of the save.
struct BackgroundSave::Job {
    CheckpointSave save;
    int rank;
    std::shared_ptr<std::vector<std::byte>> snapshot;  // the values of the tensors in `save`
    Retention retention;
    std::function<void()> before_commit;
    double start_ms = now_ms();

    enum class Stage { open, write, commit } stage = Stage::open;

    std::mutex mutex = {};  // guards the members below
    bool is_at_work = false, is_committed = false;
    double end_ms = 0;
    std::optional<Error> error = {};
    std::string warning = {};

    // Starts a thread for this rank's part of a stage. If the thread cannot be started, the stage fails.
    static void run(const std::shared_ptr<Job>& job, Stage stage) {
        job->stage = stage;
        if (stage != Stage::write && job->rank != 0) return;
        job->is_at_work = true;
        try {
            std::thread([job] { job->attempt(); }).detach();
        } catch (const std::system_error& error) {
            job->end(Error(Exit::os, format("cannot start the thread that saves a checkpoint: %s", error.what())));
        }
    }

    void attempt() {
        try {
            switch (stage) {
                case Stage::open: save.make_temporary(); break;
                case Stage::write: save.write_part(rank, copy_part); break;
                case Stage::commit: commit();
            }
            end(std::nullopt);
        } catch (const Error& failure) {
            end(failure);
        } catch (const std::bad_alloc&) {
            end(Error(Exit::os, "out of memory"));
        } catch (const std::exception& failure) {
            end(Error(Exit::internal, failure.what()));
        }
    }

    void end(const std::optional<Error>& failure) {
        const std::lock_guard lock(mutex);
        is_at_work = false;
        is_committed = stage == Stage::commit && !failure;
        error = failure;
        end_ms = now_ms();
    }

    static void copy_part(std::byte* to, const NamedTensor& tensor, size_t first, size_t count) {
        std::memcpy(to, tensor.values.from(first).data, count * size_of(tensor.values.dtype));
    }

    void commit() {
        before_commit();
        save.commit();
        try {
            apply_retention(save.run_dir, save.manifest.info.run_id, retention);
        } catch (const Error& failure) {
            warning = format("older checkpoints could not be deleted: %s", failure.what());
        }
    }
};

BackgroundSave::BackgroundSave(std::string run_dir, const Comm& comm, const Retention& retention)
    : run_dir_(std::move(run_dir)),
      comm_(comm),
      retention_(retention),
      snapshot_(std::make_shared<std::vector<std::byte>>()) {}

void BackgroundSave::reserve(const std::vector<NamedTensor>& tensors) {
    size_t bytes = 0;
    for (const NamedTensor& tensor : tensors) bytes += tensor.count * size_of(tensor.values.dtype);
    snapshot_->resize(bytes);
}

void BackgroundSave::begin(const TrainState& info, const std::vector<NamedTensor>& tensors,
                           std::function<void()> before_commit) {
    require(!job_, "checkpoint: cannot start a save while another is running");
    reserve(tensors);
    CheckpointSave save = CheckpointSave::plan(run_dir_, comm_, info, tensors);
    size_t offset = 0;
    for (NamedTensor& tensor : save.manifest.tensors) {
        const size_t bytes = tensor.count * size_of(tensor.values.dtype);
        std::byte* const copy = snapshot_->data() + offset;
        if (bytes > 0) copy_to_host(copy, tensor.values.data, bytes, Stream{});
        tensor.values.data = copy;
        offset += bytes;
    }
    synchronize(Stream{});
    job_ = std::make_shared<Job>(std::move(save), comm_.rank, snapshot_, retention_, std::move(before_commit));
    Job::run(job_, Job::Stage::open);
}

BackgroundSave::Progress BackgroundSave::progress() const {
    if (!job_) return {};
    const std::lock_guard lock(job_->mutex);
    return {job_->is_at_work ? 1.0 : 0.0, job_->error ? 1.0 : 0.0, job_->is_committed ? 1.0 : 0.0};
}

std::optional<BackgroundSave::Result> BackgroundSave::advance(const Progress& sums) {
    if (!job_ || sums.unfinished > 0) return std::nullopt;
    if (sums.failed == 0 && job_->stage != Job::Stage::commit) {
        Job::run(job_, job_->stage == Job::Stage::open ? Job::Stage::write : Job::Stage::commit);
        return std::nullopt;
    }
    const std::shared_ptr<Job> job = std::move(job_);
    job_ = nullptr;
    job->before_commit = nullptr;  // destroys its captures here, not when the thread ends
    Result result{job->save.manifest.info.step,
                  {job->save.bytes(), (job->end_ms - job->start_ms) / 1000, job->save.committed()},
                  job->error,
                  job->warning};
    if (sums.failed > 0 && comm_.rank == 0) job->save.discard();
    if (sums.failed > 0 && !result.error)
        result.error = Error(Exit::io, "checkpoint: another rank could not write its part or commit");
    return result;
}

std::optional<BackgroundSave::Result> BackgroundSave::wait(double limit_s) {
    require(bool(job_), "checkpoint: no save is running");
    const double deadline_ms = now_ms() + 1000 * limit_s;
    for (double pause_ms = 1;; pause_ms = std::min(50.0, 1.5 * pause_ms)) {
        const Progress mine = progress();
        const auto any = [&](double value) { return double(all_reduce_max(value > 0 ? 1 : 0, comm_)); };
        if (auto result = advance({any(mine.unfinished), any(mine.failed), any(mine.committed)})) return result;
        if (any(comm_.rank == 0 && now_ms() > deadline_ms) > 0) return std::nullopt;
        std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(pause_ms));
    }
}

int64_t BackgroundSave::step() const { return job_->save.manifest.info.step; }

double BackgroundSave::elapsed_s() const { return (now_ms() - job_->start_ms) / 1000; }
