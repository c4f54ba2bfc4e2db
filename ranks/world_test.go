package ranks

import (
	"errors"
	"strings"
	"testing"
	"time"

	la "gorgonia.org/leanattention"
)

func environmentOf(pairs ...string) (World, error) {
	env := map[string]string{}
	for _, p := range pairs {
		name, value, _ := strings.Cut(p, "=")
		env[name] = value
	}
	return environment(func(name string) (string, bool) { v, ok := env[name]; return v, ok })
}

func TestEnvironment(t *testing.T) {
	five := []string{"RANK=3", "WORLD_SIZE=4", "LOCAL_RANK=1", "MASTER_ADDR=node-0", "MASTER_PORT=29500"}
	for _, c := range []struct {
		env  []string
		want World
	}{
		{nil, World{Size: 1}},
		{[]string{"LOCAL_RANK=7", "MASTER_PORT=x"}, World{Size: 1}},
		{[]string{"RANK=0", "WORLD_SIZE=1"}, World{Size: 1}},
		{five, World{3, 4, 1, "node-0:29500", 0}},
		{append(five[:4:4], "MASTER_PORT=29500", "TORCHELASTIC_USE_AGENT_STORE=True"), World{3, 4, 1, "node-0:29501", 0}},
		{append(five[:4:4], "MASTER_PORT=29500", "TORCHELASTIC_USE_AGENT_STORE=False"), World{3, 4, 1, "node-0:29500", 0}},
		{append(five[:4:4], "LEANATTENTION_MASTER_PORT=4711"), World{3, 4, 1, "node-0:4711", 0}},
		{append(five[:5:5], "LEANATTENTION_RANKS_TIMEOUT=90s"), World{3, 4, 1, "node-0:29500", 90 * time.Second}},
		{[]string{"RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=::1", "MASTER_PORT=1"}, World{1, 2, 0, "[::1]:1", 0}},
	} {
		if got, err := environmentOf(c.env...); err != nil || got != c.want {
			t.Errorf("%q: %+v, %v; want %+v", c.env, got, err, c.want)
		}
	}
	for _, c := range []struct{ bad, want string }{
		{"RANK=4", `RANK is "4", want a number from 0 to 3`},
		{"RANK=-1", `RANK is "-1"`},
		{"RANK=", `RANK is ""`},
		{"RANK= 1", `RANK is " 1"`},
		{"RANK=01", `RANK is "01"`},
		{"RANK", ""},
		{"WORLD_SIZE=0", `WORLD_SIZE is "0", want a number from 1 to 1024`},
		{"WORLD_SIZE=four", `WORLD_SIZE is "four"`},
		{"WORLD_SIZE=99999999999999999999", `WORLD_SIZE is`},
		{"LOCAL_RANK=4", `LOCAL_RANK is "4", want a number from 0 to 3`},
		{"MASTER_ADDR=", `MASTER_ADDR is ""`},
		{"MASTER_ADDR=a b", `MASTER_ADDR is "a b"`},
		{"MASTER_PORT=0", `MASTER_PORT is "0", want a number from 1 to 65535`},
		{"MASTER_PORT=http", `MASTER_PORT is "http"`},
		{"LEANATTENTION_MASTER_PORT=70000", `LEANATTENTION_MASTER_PORT is "70000"`},
		{"LEANATTENTION_RANKS_TIMEOUT=soon", `LEANATTENTION_RANKS_TIMEOUT is "soon"`},
		{"LEANATTENTION_RANKS_TIMEOUT=-1s", `LEANATTENTION_RANKS_TIMEOUT is "-1s"`},
	} {
		_, err := environmentOf(append(five[:5:5], c.bad)...)
		if !errors.Is(err, la.ErrOption) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %s", c.bad, err, c.want)
		}
	}
	for i, without := range five {
		if i == 2 {
			continue
		}
		name, _, _ := strings.Cut(without, "=")
		env := append(append([]string(nil), five[:i]...), five[i+1:]...)
		if _, err := environmentOf(env...); !errors.Is(err, la.ErrOption) || !strings.Contains(err.Error(), name+" is not set") {
			t.Errorf("without %s: %v", name, err)
		}
	}
}

func TestPart(t *testing.T) {
	for size := 1; size < 9; size++ {
		for n := range 50 {
			at := 0
			for rank := range size {
				from, to := World{Rank: rank, Size: size}.Part(n)
				if from != at || to-from < n/size || to-from > (n+size-1)/size {
					t.Fatalf("rank %d of %d has %d to %d of %d", rank, size, from, to, n)
				}
				at = to
			}
			if at != n {
				t.Fatalf("%d of %d are left over", n-at, n)
			}
		}
	}
}

func TestWorldCheck(t *testing.T) {
	for _, w := range []World{{}, {Size: 1025}, {Rank: 2, Size: 2, Address: "a:1"}, {Rank: -1, Size: 2, Address: "a:1"},
		{Size: 2}, {Size: 2, Address: "a"}, {Size: 1, LocalRank: -1}, {Size: 1, Timeout: -1}} {
		if _, err := w.OpenGPU(); !errors.Is(err, la.ErrOption) {
			t.Errorf("OpenGPU, %+v: %v", w, err)
		}
		if _, err := Join(t.Context(), nil, w); !errors.Is(err, la.ErrOption) {
			t.Errorf("Join, %+v: %v", w, err)
		}
	}
	if _, err := Join(t.Context(), nil, World{Size: 1}); !errors.Is(err, la.ErrState) {
		t.Errorf("no GPU: %v", err)
	}
}

// Nothing panics on what Join has not made.
func TestZero(t *testing.T) {
	for _, c := range []*Comm{nil, {}} {
		if c.Rank() != 0 || c.Size() != 0 || c.NCCL() != "" || c.World() != (World{}) {
			t.Errorf("%+v", c)
		}
		c.Fail(errors.New("nothing"))
		for _, err := range []error{c.Err(), c.Barrier(), c.Close()} {
			if !errors.Is(err, la.ErrState) {
				t.Errorf("%v", err)
			}
		}
	}
}
