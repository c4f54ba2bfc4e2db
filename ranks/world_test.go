package ranks

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
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
		{five, World{3, 4, 1, "node-0:29500", "", 0}},
		{append(five[:4:4], "MASTER_PORT=29500", "TORCHELASTIC_USE_AGENT_STORE=True"), World{3, 4, 1, "node-0:29501", "", 0}},
		{append(five[:4:4], "MASTER_PORT=29500", "TORCHELASTIC_USE_AGENT_STORE=False"), World{3, 4, 1, "node-0:29500", "", 0}},
		{append(five[:4:4], "LEANATTENTION_MASTER_PORT=4711"), World{3, 4, 1, "node-0:4711", "", 0}},
		{append(five[:5:5], "LEANATTENTION_RANKS_TIMEOUT=90s"), World{3, 4, 1, "node-0:29500", "", 90 * time.Second}},
		{append(five[:5:5], "LEANATTENTION_JOB=a", "TORCHELASTIC_RUN_ID=b"), World{3, 4, 1, "node-0:29500", "a", 0}},
		{append(five[:5:5], "TORCHELASTIC_RUN_ID=b"), World{3, 4, 1, "node-0:29500", "b", 0}},
		{[]string{"RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=::1", "MASTER_PORT=1"}, World{1, 2, 0, "[::1]:1", "", 0}},
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
		{"LEANATTENTION_JOB=" + strings.Repeat("a", 129), `LEANATTENTION_JOB has 129 bytes`},
		{"TORCHELASTIC_RUN_ID=" + strings.Repeat("a", 129), `TORCHELASTIC_RUN_ID has 129 bytes`},
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
		{Size: 2}, {Size: 2, Address: "a"}, {Size: 1, Job: strings.Repeat("a", 129)}, {Size: 1, LocalRank: -1}, {Size: 1, Timeout: -1}} {
		if _, err := w.OpenGPU(); !errors.Is(err, la.ErrOption) {
			t.Errorf("OpenGPU, %+v: %v", w, err)
		}
		if _, err := Join(t.Context(), nil, w); !errors.Is(err, la.ErrOption) {
			t.Errorf("Join, %+v: %v", w, err)
		}
	}
	if _, err := Join(t.Context(), new(device.GPU), World{Size: 1}); !errors.Is(err, la.ErrState) {
		t.Errorf("no GPU: %v", err)
	}
}

// A secret comes from the environment or from a file. One that is short or can't be read is an error, which does not show it.
func TestSecret(t *testing.T) {
	file := func(text string) string {
		name := filepath.Join(t.TempDir(), "secret")
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	const good, short = "0123456789abcdef", "0123456789abcde"
	for _, c := range []struct {
		env  []string
		want string // or the error
		bad  bool
	}{
		{nil, "", false},
		{[]string{"LEANATTENTION_SECRET=" + good}, good, false},
		{[]string{"LEANATTENTION_SECRET_FILE=" + file(good)}, good, false},
		{[]string{"LEANATTENTION_SECRET_FILE=" + file(good+"\n")}, good, false},
		{[]string{"LEANATTENTION_SECRET_FILE=" + file(good+"\r\n")}, good, false},
		{[]string{"LEANATTENTION_SECRET_FILE=" + file(strings.Repeat("a", mostSecret)+"\n")}, strings.Repeat("a", mostSecret), false},
		{[]string{"LEANATTENTION_SECRET="}, "LEANATTENTION_SECRET: a secret of 0 bytes, want 16 to 4096", true},
		{[]string{"LEANATTENTION_SECRET=" + short}, "LEANATTENTION_SECRET: a secret of 15 bytes", true},
		{[]string{"LEANATTENTION_SECRET_FILE=" + file(short+"\n")}, "LEANATTENTION_SECRET_FILE: a secret of 15 bytes", true},
		{[]string{"LEANATTENTION_SECRET_FILE=" + file(strings.Repeat("a", mostSecret+1))}, "LEANATTENTION_SECRET_FILE: a secret of 4097 bytes", true},
		{[]string{"LEANATTENTION_SECRET_FILE=" + filepath.Join(t.TempDir(), "none")}, "LEANATTENTION_SECRET_FILE: open ", true},
		{[]string{"LEANATTENTION_SECRET_FILE=" + t.TempDir()}, "LEANATTENTION_SECRET_FILE: ", true},
		{[]string{"LEANATTENTION_SECRET=" + good, "LEANATTENTION_SECRET_FILE=x"}, "LEANATTENTION_SECRET and LEANATTENTION_SECRET_FILE are both set", true},
	} {
		env := map[string]string{}
		for _, e := range c.env {
			name, value, _ := strings.Cut(e, "=")
			env[name] = value
		}
		got, err := secret(func(name string) (string, bool) { v, ok := env[name]; return v, ok })
		switch {
		case c.bad && (!errors.Is(err, la.ErrOption) || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), short)):
			t.Errorf("%q: %v, want %s", c.env, err, c.want)
		case !c.bad && (err != nil || string(got) != c.want):
			t.Errorf("%q: %q, %v", c.env, got, err)
		}
	}
}

// Nothing panics on what Join has not made.
func TestZero(t *testing.T) {
	for _, c := range []*Comm{nil, {}} {
		if c.World() != (World{}) {
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
