package cpu

import (
	"bytes"
	"io"
	"regexp"
	"testing"
	"time"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/measure/measuretest"
)

// TestCases: the shapes and bars are those that were asked for.
func TestCases(t *testing.T) {
	for _, c := range memoryCases() {
		if c.shape.bytes() != memorySize || c.inCache {
			t.Errorf("%v: %d bytes, in cache: %t", c.shape, c.shape.bytes(), c.inCache)
		}
		want := 0.85
		if c.shape.heads/c.shape.kvHeads > 1 {
			want = 0.8
		} else if c.shape.storage == measure.StoreF32 {
			want = 0.9
		}
		if *c.share.Least != want {
			t.Errorf("%v: bar of %v", c.shape, *c.share.Least)
		}
	}
	for _, c := range cacheCases() {
		if c.shape.heads != 12 || c.shape.keys != 1024 || c.shape.dim != 64 || !c.inCache || *c.allocs.Most != 0 {
			t.Errorf("%v, in cache: %t", c.shape, c.inCache)
		}
		if f32 := c.shape.storage == measure.StoreF32; f32 != (c.faster != nil && *c.faster.Least == 8 && c.stock) {
			t.Errorf("%v: %+v", c.shape, c.faster)
		}
	}
	if n, m := len(memoryCases()), len(contextCases()); n != 18 || m != 30 {
		t.Errorf("%d and %d cases", n, m)
	}
	for _, c := range peerCases() {
		want := map[measure.Storage]float64{measure.StoreF32: 1.4, measure.StoreF16: 2.2, measure.StoreBF16: 7}[c.shape.storage]
		grouped := c.shape.heads != c.shape.kvHeads
		switch {
		case grouped && c.shape.storage != measure.StoreF32:
			want = 0
		case grouped:
			want = 4
		case c.inCache && c.shape.storage == measure.StoreF32:
			want = 1
		}
		if got := c.faster; (got == nil) != (want == 0) || got != nil && *got.Least != want {
			t.Errorf("%v, in cache %t: %+v", c.shape, c.inCache, got)
		}
	}
}

func testBench(t *testing.T) (*attentionBench, *bytes.Buffer) {
	out := new(bytes.Buffer)
	return &attentionBench{
		report: &measure.Report{}, pace: measure.Pace{Rounds: 2, Turn: time.Millisecond}, stdout: out, stderr: io.Discard, rng: measuretest.Rand(t),
	}, out
}

// TestMeasure: a case has all its figures, with bars where they belong, and
// they fit each other.
func TestMeasure(t *testing.T) {
	b, out := testBench(t)
	shape := decodeShape{heads: 4, kvHeads: 4, keys: 100, dim: 16, storage: measure.StoreF32}
	if err := b.measure(one{
		table: "T", shape: shape, inCache: true, stock: true,
		share: measure.AtLeast(1e9), faster: measure.AtLeast(1e-9), allocs: measure.AtMost(0),
	}); err != nil {
		t.Fatal(err)
	}
	is := shape.String()
	if is != "f32, 4 heads x 100 x 16" {
		t.Errorf("the case is called %q", is)
	}
	for _, who := range []string{"read ceiling", "lean, Attend", "lean, node", "default node"} {
		ours := who == "lean, Attend" || who == "lean, node"
		for _, m := range []measure.Metric{measure.Speed, measure.BestSpeed, measure.Share, measure.OverStock, measure.Allocs} {
			f := b.report.Find(is, who, m)
			there := m == measure.Speed || m == measure.BestSpeed || who != "read ceiling" && m != measure.OverStock || ours
			if (f != nil) != there {
				t.Errorf("%s of %s: %+v", m, who, f)
			}
			if f == nil {
				continue
			}
			if barred := ours && (m == measure.Share || m == measure.OverStock) || who == "lean, Attend" && m == measure.Allocs; (f.Bar != nil) != barred {
				t.Errorf("%s of %s has the bar %+v", m, who, f.Bar)
			}
			if f.Value < 0 || m != measure.Allocs && f.Value == 0 {
				t.Errorf("%s of %s is %v", m, who, f.Value)
			}
		}
		if s, best := b.report.Find(is, who, measure.Speed), b.report.Find(is, who, measure.BestSpeed); s.Value > best.Value {
			t.Errorf("%s: %v GB/s, and %v at best", who, s.Value, best.Value)
		}
	}
	if f := b.report.Find(is, "lean, Attend", measure.Share); f.Bar.Met {
		t.Errorf("%v of the ceiling meet %v", f.Value, *f.Bar.Least)
	}
	if f := b.report.Find(is, "default node", measure.Allocs); f.Value < 10 {
		t.Errorf("the default node makes %v allocations", f.Value)
	}
	b.report.WriteTable(out, "T")
	if n := bytes.Count(out.Bytes(), []byte("\n")); n != 9 {
		t.Errorf("the table has %d lines:\n%s", n, out)
	}
}

// TestOnly: a pattern picks shapes, and one that picks none is an error.
func TestOnly(t *testing.T) {
	b, _ := testBench(t)
	if err := b.cpu(regexp.MustCompile("no such shape")); err == nil || len(b.report.Figures) > 0 {
		t.Errorf("%v, %d figures", err, len(b.report.Figures))
	}
	if err := b.cpu(regexp.MustCompile("^bf16, 12 heads x 128 x")); err != nil {
		t.Fatal(err)
	}
	for _, f := range b.report.Figures {
		if f.Case != "bf16, 12 heads x 128 x 64" {
			t.Errorf("%+v", f)
		}
	}
}
