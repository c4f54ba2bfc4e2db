package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"testing"
	"time"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/measure/measuretest"
)

// TestLeanEngine: the decoder's text does not depend on what computes it.
func TestLeanEngine(t *testing.T) {
	for _, s := range []measure.Storage{measure.StoreF16, measure.StoreBF16} {
		dir := t.TempDir()
		if err := writeCheckpoint(dir, smallShape(), s, 1); err != nil {
			t.Fatal(err)
		}
		e, err := openLean(dir, s)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, ids, err := e.decode(2, 5, 6); err != nil || len(ids) != 7 {
			t.Errorf("%s: tokens %v, error %v", s.Name, ids, err)
		}
		if err := e.close(); err != nil {
			t.Error(err)
		}
	}
	dir := t.TempDir()
	if err := writeCheckpoint(dir, smallShape(), measure.StoreF32, 1); err != nil {
		t.Fatal(err)
	}
	for _, batch := range []int{1, 3} {
		var want string
		e, err := openLean(dir, measure.StoreF32)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // a turn does not depend on the one before
			prompt, steady, ids, err := e.decode(batch, 5, 6)
			if err != nil || prompt <= 0 || steady <= 0 || len(ids) != 7 {
				t.Fatalf("%v, %v, %d tokens (%v)", prompt, steady, len(ids), err)
			}
			if got := strings.Join(ids, " "); want == "" {
				want = got
			} else if got != want {
				t.Errorf("batch of %d: tokens %s, want %s", batch, got, want)
			}
		}
		if err := e.close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := openLean(t.TempDir(), measure.StoreF32); err == nil {
		t.Error("an empty folder was opened")
	}
	if a, b := promptTokens(1, 3, 320), []int{4 + 104729%316, 4 + (7919+104729)%316, 4 + (2*7919+104729)%316}; fmt.Sprint(a) != fmt.Sprint(b) {
		t.Errorf("prompt %v, want %v", a, b)
	}
}

// fixed is an engine that takes given seconds for its prompt and for a step.
type fixed struct {
	prompt, step float64
	ids          []string
}

func (f fixed) decode(batch, context, steps int) (prompt, steady time.Duration, ids []string, err error) {
	if f.ids == nil {
		return 0, 0, nil, errors.New("no text")
	}
	seconds := func(s float64) time.Duration { return time.Duration(math.Round(s * 1e9)) }
	return seconds(f.prompt), seconds(f.step * float64(steps)), f.ids, nil
}
func (f fixed) close() error { return nil }

// TestDecodings: times become tokens and ratios, and bars stand where they belong.
func TestDecodings(t *testing.T) {
	out := new(bytes.Buffer)
	b := &e2e{report: &measure.Report{}, stdout: out, stderr: io.Discard}
	var entrants []entrant
	for _, name := range []string{nameLean, nameHalf, nameBrain, nameHF, nameCT2, nameCT2Int8} {
		entrants = append(entrants, entrant{name: name, exact: true})
	}
	text := []string{"1", "2", "3", "4"}
	engines := make([]engine, len(entrants))
	step := map[string]float64{nameLean: 0.02, nameHalf: 0.01, nameBrain: 0.011, nameHF: 0.04, nameCT2: 0.03, nameCT2Int8: 0.009}
	for i, e := range entrants {
		engines[i] = fixed{2, step[e.name], text}
	}
	for _, d := range b.decodings() {
		if err := b.measure(d, entrants, engines); err != nil {
			t.Fatal(err)
		}
	}
	value := func(table, who string, m measure.Metric) (float64, *measure.Bar) {
		for _, f := range b.report.Figures {
			if strings.Contains(f.Table, table) && f.Contender == who && f.Metric == m {
				return f.Value, f.Bar
			}
		}
		t.Fatalf("no %s of %s", m, who)
		return 0, nil
	}
	for _, c := range []struct {
		table, who string
		metric     measure.Metric
		want       float64
		bar        string
	}{
		{"One", nameLean, measure.Tokens, 50, ""},
		{"One", nameLean, measure.BestTokens, 50, ""},
		{"One", nameLean, measure.Prompt, 32, ""},
		{"One", nameLean, measure.OverCT2, 1.5, ">= 1.25: met"},
		{"One", nameLean, measure.OverHF, 2, ""},
		{"One", nameHalf, measure.OverHF, 4, ">= 2.00: met"},
		{"One", nameHalf, measure.OverInt8, 0.9, ">= 1.00: **missed**"},
		{"One", nameCT2, measure.OverHF, 4. / 3, ""},
		{"8", nameLean, measure.Tokens, 400, ""},
		{"8", nameLean, measure.Prompt, 4096, ""},
		{"8", nameLean, measure.OverCT2, 1.5, ">= 1.20: met"},
		{"8", nameHalf, measure.OverHF, 4, ""},
	} {
		v, bar := value(c.table, c.who, c.metric)
		text := ""
		if bar != nil {
			text = bar.Text(c.metric)
		}
		if !measuretest.Near(v, c.want) || text != c.bar {
			t.Errorf("%s, %s: %v %s %q, want %v %q", c.table, c.who, v, c.metric, text, c.want, c.bar)
		}
	}

	engines[1] = fixed{1, 1, nil}
	if err := b.measure(b.decodings()[0], entrants, engines); err == nil || !strings.Contains(err.Error(), nameHalf+": no text") {
		t.Errorf("an engine that fails: %v", err)
	}
}

func TestSameText(t *testing.T) {
	entrants := []entrant{{name: "a"}, {name: "b", exact: true}, {name: "c", exact: true}}
	words := strings.Fields
	for _, c := range []struct {
		a, b, c string
		same    bool
	}{
		{"9 9 9 9", "1 2 3 4", "1 2 3 4", true},
		{"9 9 9 9", "1 2 3 4", "1 8 8 8", true},
		{"9 9 9 9", "1 2 3 4", "8 2 3 4", false},
		{"9 9 9 9", "1 2 3 4 5", "1 2 3 4", false},
	} {
		err := sameText(entrants, [][]string{words(c.a), words(c.b), words(c.c)})
		if (err == nil) != c.same || err != nil && !strings.Contains(err.Error(), "c ("+c.c+")") {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func TestMain(m *testing.M) { measuretest.Main(m) }
