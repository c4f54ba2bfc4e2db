// Package rankstest runs a test in several processes at once, which are ranks with emulated
// GPUs and a fake NCCL: the test's own binary, started again for each.
package rankstest

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/nccl"
	"gorgonia.org/leanattention/internal/nccl/fakenccl"
)

const outVariable = "LEANATTENTION_TEST_RANK_OUT"

// limit is how long processes may take before they count as hanging.
const limit = 2 * time.Minute

// Child says whether this process is one of the ranks.
func Child() bool { return os.Getenv(outVariable) != "" }

// Write is what a rank's part of the test has found, for the one who started it.
func Write(t testing.TB, text string) {
	t.Helper()
	if err := os.WriteFile(os.Getenv(outVariable), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// Rank is what became of one.
type Rank struct {
	Err    error  // of the process
	Output string // of the process
	Text   string // of Write
	Took   time.Duration
}

// builds has each library once for the test binary.
var builds struct {
	sync.Mutex
	env []string
	dir string
}

// libraries are the environment with the fake NCCL and the fake driver.
func libraries(t *testing.T) []string {
	t.Helper()
	builds.Lock()
	defer builds.Unlock()
	if builds.env == nil {
		dir, err := os.MkdirTemp("", "ranks")
		if err != nil {
			t.Fatal(err)
		}
		builds.env = Libraries(t, dir)
		builds.dir = dir
	}
	return builds.env
}

// Libraries builds the fake NCCL and the fake driver in a folder: the environment of processes that are to have them.
func Libraries(t testing.TB, dir string) []string {
	t.Helper()
	return []string{"LEANATTENTION_GPU=emulated", nccl.Variable + "=" + fakenccl.Build(t, dir), fakedriver.BuildSystem(t, dir)}
}

// Main is a testing.M that removes what was built for its tests.
type Main struct{ M *testing.M }

// Run runs the tests.
func (m Main) Run() int {
	defer func() {
		if builds.dir != "" {
			_ = os.RemoveAll(builds.dir)
		}
	}()
	return m.M.Run()
}

// Run starts so many processes that run the calling test, and waits for them. env is more of
// their environment, with %d for the rank, and comes last. Those in without are not started.
func Run(t *testing.T, size int, env []string, without ...int) []Rank {
	t.Helper()
	return RunHost(t, size, append(slices.Clone(libraries(t)), env...), without...)
}

// RunHost is Run of ranks without GPUs.
func RunHost(t *testing.T, size int, env []string, without ...int) []Rank {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
	_ = l.Close()
	test, _, _ := strings.Cut(t.Name(), "/") // its parts are the parent's
	dir, all := t.TempDir(), make([]Rank, size)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	var wait sync.WaitGroup
	for rank := range all {
		if slices.Contains(without, rank) {
			continue
		}
		out := filepath.Join(dir, fmt.Sprint(rank))
		c := exec.CommandContext(ctx, os.Args[0], "-test.run=^"+test+"$", "-test.count=1", "-test.v=false")
		c.Env = append(os.Environ(), "MASTER_ADDR=127.0.0.1", "MASTER_PORT="+port,
			"WORLD_SIZE="+strconv.Itoa(size), "RANK="+strconv.Itoa(rank), "LOCAL_RANK="+strconv.Itoa(rank), outVariable+"="+out)
		for _, e := range env {
			c.Env = append(c.Env, strings.ReplaceAll(e, "%d", strconv.Itoa(rank)))
		}
		var output bytes.Buffer
		c.Stdout, c.Stderr = &output, &output
		began := time.Now()
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		wait.Go(func() {
			r := &all[rank]
			r.Err = c.Wait()
			r.Took = time.Since(began)
			r.Output = output.String()
			text, _ := os.ReadFile(out)
			r.Text = string(text)
		})
	}
	wait.Wait()
	if ctx.Err() != nil {
		t.Fatalf("a rank hangs: %+v", all)
	}
	return all
}
