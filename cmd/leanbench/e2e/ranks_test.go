package e2e

import (
	"errors"
	"io"
	"os/exec"
	"strings"
	"testing"
	"time"

	"gorgonia.org/leanattention/cmd/leanbench/gpu"
	"gorgonia.org/leanattention/cmd/leanbench/measure/measuretest"
)

// TestRankSet: all ranks are asked, and the slowest one's time counts. One that can't go on ends all, and they are started again
// when they are needed.
func TestRankSet(t *testing.T) {
	defer func(f func(...string) (*exec.Cmd, error)) { startRank = f }(startRank)
	set := func(how string) *rankSet {
		startRank = func(args ...string) (*exec.Cmd, error) {
			c := measuretest.Command(t, how)
			c.Args = append(c.Args, args...)
			return c, nil
		}
		s := &rankSet{Ranks: gpu.Ranks{Size: 3, GPUs: 2}, have: 6, shape: optShapes["125m"], stderr: io.Discard}
		t.Cleanup(func() {
			if err := s.close(); err != nil {
				t.Error(err)
			}
		})
		return s
	}
	s := set("rank")
	if err := s.read(1, 8, 4); err != nil {
		t.Fatal(err)
	}
	if took, err := s.again(2); took != 6*time.Millisecond || err != nil {
		t.Errorf("%v, %v", took, err)
	}
	if _, took, ids, err := s.decode(1, 8, 5); took != 15*time.Millisecond || strings.Join(ids, " ") != "7 8" || err != nil {
		t.Errorf("%v, %q, %v", took, ids, err)
	}
	if s.nccl != "1.2.3" {
		t.Errorf("NCCL %q", s.nccl)
	}
	for rank, gpus := range []string{"0,1", "2,3", "4,5"} {
		w := s.workers[rank]
		if err := w.Close(); err != nil {
			t.Error(err)
		}
		if text := w.Stderr.Text(); !strings.Contains(text, "-gpus "+gpus+"\nmodel {") || !strings.Contains(text, `"model_type":"opt"`) || !strings.HasSuffix(text, "read 1 8 4\nagain 2\nsteps 1 8 5") {
			t.Errorf("rank %d was asked %s", rank, text)
		}
	}

	s = set("rank-short")
	var why leftOut
	if err := s.read(16, 8, 4); !errors.As(err, &why) || why != "rank 1: memory" || s.workers != nil {
		t.Errorf("%v", err)
	}
	if err := s.read(1, 8, 4); err != nil { // by new ones
		t.Error(err)
	}
	if err := s.rest(); err != nil {
		t.Error(err)
	}
	s = set("rank-fails")
	if _, _, _, err := s.decode(1, 8, 4); err == nil || errors.As(err, &why) || !strings.Contains(err.Error(), "it is broken") {
		t.Errorf("%v", err)
	}
	s = set("rank-mute")
	if _, _, _, err := s.decode(1, 8, 4); err == nil || !strings.Contains(err.Error(), "no time") {
		t.Errorf("%v", err)
	}
	s = set("rank-alone")
	if err := s.read(1, 8, 4); !errors.As(err, &why) || !strings.Contains(string(why), "no NCCL") {
		t.Errorf("%v", err)
	}
	s.have = 5
	if err := s.read(1, 8, 4); !errors.As(err, &why) || why != "6 GPUs are needed, and there are 5" {
		t.Errorf("%v", err)
	}
}

// TestServeRank: what a rank can't do is told, and ends it.
func TestServeRank(t *testing.T) {
	for _, v := range []string{"RANK", "WORLD_SIZE"} {
		t.Setenv(v, "x")
	}
	var out strings.Builder
	if err := serveRank([]int{0}, strings.NewReader(""), &out); err == nil || !strings.HasPrefix(out.String(), "error ranks: Environment: ") || strings.Count(out.String(), "\n") != 1 {
		t.Errorf("%q, %v", out.String(), err)
	}
	r := &rankServer{}
	for _, q := range []string{"read 1 2 3", "steps", ""} {
		if _, err := r.do(q, ""); err == nil || !strings.Contains(err.Error(), "before there is a model") {
			t.Errorf("%q: %v", q, err)
		}
	}
	if err := r.load("{"); err == nil {
		t.Error("half a model was taken")
	}
	r.engine = &leanEngine{done: func() error { return nil }}
	for _, q := range [][2]string{{"read", "1 2"}, {"again", ""}, {"steps", "1 x 2"}, {"what", ""}} {
		if _, err := r.do(q[0], q[1]); err == nil {
			t.Errorf("%q was taken", q)
		}
	}
	if err := r.close(); err != nil {
		t.Error(err)
	}
}
