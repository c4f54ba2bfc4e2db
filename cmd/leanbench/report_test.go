package main

import (
	"bytes"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

func TestBar(t *testing.T) {
	for _, c := range []struct {
		bar   *bar
		value float64
		met   bool
		text  string
	}{
		{atLeast(0.9), 0.9, true, ">= 90%: met"},
		{atLeast(0.9), 0.8999, false, ">= 90%: **missed**"},
		{atLeast(0.9), math.Inf(1), true, ">= 90%: met"},
		{atLeast(0.9), math.NaN(), false, ">= 90%: **missed**"},
		{ofCeiling(0.8), 0.8, true, ">= 80% and <= 115%: met"},
		{ofCeiling(0.8), 0.79, false, ">= 80% and <= 115%: **missed**"},
		{ofCeiling(0.8), 5, false, ">= 80% and <= 115%: **missed**"},
		{atMost(0.5), 0, true, "<= 50%: met"},
		{atMost(0.5), 1, false, "<= 50%: **missed**"},
		{atMost(0.5), math.NaN(), false, "<= 50%: **missed**"},
	} {
		b := c.bar.judge(c.value)
		if b.Met != c.met || b.text(share) != c.text {
			t.Errorf("%v: %t, %q; want %t, %q", c.value, b.Met, b.text(share), c.met, c.text)
		}
		if c.bar.Met {
			t.Errorf("judging %v changed the bar", c.value)
		}
	}
	if (*bar)(nil).judge(1) != nil {
		t.Error("no bar became one")
	}
}

func testReport() *report {
	r := &report{Command: "cpu", Machine: machine{CPU: "Z80", Cores: 2, Workers: 1, Kernels: "go", Go: "go1.26", Load: 0.25}}
	a := r.row("Some", "8 heads", "ceiling")
	a.add(speed, 20, nil)
	b := r.row("Some", "8 heads", "ours")
	b.add(speed, 18.04, nil)
	b.add(share, 0.902, atLeast(0.9))
	b.add(allocs, 2, atMost(0))
	r.row("Some", "9 heads", "ceiling").add(speed, 21, nil)
	r.row("Other", "", "ours").add(overTorch, 3.456, atLeast(4))
	return r
}

func TestTables(t *testing.T) {
	r := testReport()
	var out bytes.Buffer
	r.writeHead(&out)
	r.writeTable(&out, "Some")
	r.writeTable(&out, "Other")
	r.writeVerdict(&out)
	const want = "`leanbench cpu`; Z80, 1 of 2 cores, go kernels, go1.26, load 0.2 before\n" + `
### Some

| | | GB/s | of the ceiling | allocs |
|---|---|---|---|---|
| 8 heads | ceiling | 20.0 |  |  |
|  | ours | 18.0 | 90% (>= 90%: met) | 2 (<= 0: **missed**) |
| 9 heads | ceiling | 21.0 |  |  |

### Other

| | | x PyTorch |
|---|---|---|
|  | ours | 3.46 (>= 4.00: **missed**) |

Bars met: 1 of 3. Missed:
- Some; 8 heads; ours: 2 allocs, and the bar is <= 0
- Other; ours: 3.46 x PyTorch, and the bar is >= 4.00
`
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
}

func TestNoBars(t *testing.T) {
	var out bytes.Buffer
	new(report).writeVerdict(&out)
	if out.String() != "\nNone of these figures has a bar.\n" {
		t.Errorf("%q", out.String())
	}
}

func TestSave(t *testing.T) {
	r, name := testReport(), filepath.Join(t.TempDir(), "r.json")
	if err := r.save(""); err != nil {
		t.Fatal(err)
	}
	if err := r.save(name); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	back := new(report)
	if err := json.Unmarshal(data, back); err != nil || !reflect.DeepEqual(back, r) {
		t.Errorf("read back (%v): %+v", err, back)
	}
	var plain struct {
		Figures []struct {
			Metric string
			Value  float64
			Bar    *struct {
				Least *float64
				Met   bool
			}
		}
	}
	if err := json.Unmarshal(data, &plain); err != nil || len(plain.Figures) != 6 {
		t.Fatalf("%d figures (%v)", len(plain.Figures), err)
	}
	if f := plain.Figures[2]; f.Metric != "of the ceiling" || f.Value != 0.902 || f.Bar == nil || *f.Bar.Least != 0.9 || !f.Bar.Met {
		t.Errorf("figure %+v", f)
	}
}
