package measure

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"gorgonia.org/leanattention/cmd/leanbench/measure/measuretest"
)

// scripted is a contender whose steps take a given time, the first ones longer.
func scripted(name string, log *[]string, step, first time.Duration) Contender {
	done := 0
	return Contender{Name: name, Run: func(n int) (time.Duration, error) {
		*log = append(*log, fmt.Sprintf("%s%d", name, n))
		var d time.Duration
		for range n {
			if done++; done <= 3 {
				d += first
			} else {
				d += step
			}
		}
		return d, nil
	}}
}

func TestAlternate(t *testing.T) {
	var log []string
	make := func() []Contender {
		log = nil
		return []Contender{
			scripted("a", &log, 10*time.Millisecond, 10*time.Millisecond),
			scripted("b", &log, 20*time.Millisecond, 20*time.Millisecond),
		}
	}
	for _, c := range []struct {
		pace Pace
		want string
	}{
		{Pace{Rounds: 3, Steps: 5}, "a5 b5 a5 b5 a5 b5 a5 b5"},
		{Pace{Rounds: 3, Steps: 5, Warm: true}, "a5 b5 a5 b5 a5 b5"},
	} {
		all, err := Alternate(c.pace, make())
		if got := strings.Join(log, " "); err != nil || got != c.want {
			t.Errorf("%+v: turns %s (%v), want %s", c.pace, got, err, c.want)
		}
		for i, step := range []float64{0.01, 0.02} {
			if len(all[i]) != 3 || !measuretest.Near(all[i][0], step) || !measuretest.Near(all[i][2], step) {
				t.Errorf("%+v: contender %d took %v, want 3 times %v", c.pace, i, all[i], step)
			}
		}
	}

	// As many steps as fill a turn, whatever the first ones take.
	log = nil
	all, err := Alternate(Pace{Rounds: 2, Turn: time.Second}, []Contender{
		scripted("a", &log, 100*time.Microsecond, 50*time.Millisecond),
		scripted("b", &log, 3*time.Second, 3*time.Second),
	})
	if err != nil {
		t.Fatal(err)
	}
	var a, b int
	if n, err := fmt.Sscanf(strings.Join(log[len(log)-2:], " "), "a%d b%d", &a, &b); n != 2 || a < 8000 || a > 12000 || b != 1 {
		t.Errorf("turns %v (%v), want some 10000 steps of 0.1 ms and 1 of 3 s to fill a second", log, err)
	}
	if !measuretest.Near(all[0][1], 1e-4) || !measuretest.Near(all[1][1], 3) {
		t.Errorf("steps of %v", all)
	}

	broken := Contender{Name: "c", Run: func(int) (time.Duration, error) { return 0, errors.New("out of order") }}
	for _, p := range []Pace{{Rounds: 1, Steps: 1}, {Rounds: 1, Turn: time.Second}, {Rounds: 1, Steps: 1, Warm: true}} {
		if _, err := Alternate(p, append(make(), broken)); err == nil || err.Error() != "c: out of order" {
			t.Errorf("%+v: error %v", p, err)
		}
	}
}

func TestSamples(t *testing.T) {
	if m := (Samples{5, 1, 4}).Median(); m != 4 {
		t.Errorf("median of 3 is %v", m)
	}
	if m := (Samples{5, 1, 4, 2}).Median(); m != 3 {
		t.Errorf("median of 4 is %v", m)
	}
	s := Samples{5, 1, 4}
	if s.Best() != 1 || s.Median() != 4 || s[0] != 5 {
		t.Errorf("best %v, median %v, samples now %v", s.Best(), s.Median(), s)
	}
	// The machine was 100 times as slow in the last round, which both felt, and
	// something came between in the second.
	if x := (Samples{0.5, 20, 50}).Faster(Samples{1, 10, 100}); x != 2 {
		t.Errorf("%v times as fast, want 2", x)
	}
}

var sink [][]byte

func TestAllocations(t *testing.T) {
	for want := range 3 {
		first := true
		n, err := Allocations(Contender{Run: Timed(func() error {
			sink = sink[:0]
			if first {
				sink, first = make([][]byte, 0, 8), false
			}
			for range want {
				sink = append(sink, make([]byte, 100))
			}
			return nil
		})}, 50)
		if err != nil || n != float64(want) {
			t.Errorf("%v allocations (%v), want %d", n, err, want)
		}
	}
	broken := Contender{Name: "c", Run: Timed(func() error { return errors.New("out of order") })}
	if _, err := Allocations(broken, 1); err == nil || err.Error() != "c: out of order" {
		t.Errorf("error %v", err)
	}
}
