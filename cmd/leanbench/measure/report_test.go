package measure

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
		bar   *Bar
		value float64
		met   bool
		text  string
	}{
		{AtLeast(0.9), 0.9, true, ">= 90%: met"},
		{AtLeast(0.9), 0.8999, false, ">= 90%: **missed**"},
		{AtLeast(0.9), math.Inf(1), true, ">= 90%: met"},
		{AtLeast(0.9), math.NaN(), false, ">= 90%: **missed**"},
		{OfCeiling(0.8), 0.8, true, ">= 80% and <= 115%: met"},
		{OfCeiling(0.8), 0.79, false, ">= 80% and <= 115%: **missed**"},
		{OfCeiling(0.8), 5, false, ">= 80% and <= 115%: **missed**"},
		{AtMost(0.5), 0, true, "<= 50%: met"},
		{AtMost(0.5), 1, false, "<= 50%: **missed**"},
		{AtMost(0.5), math.NaN(), false, "<= 50%: **missed**"},
	} {
		b := c.bar.Judge(c.value)
		if b.Met != c.met || b.Text(Share) != c.text {
			t.Errorf("%v: %t, %q; want %t, %q", c.value, b.Met, b.Text(Share), c.met, c.text)
		}
		if c.bar.Met {
			t.Errorf("judging %v changed the bar", c.value)
		}
	}
	if (*Bar)(nil).Judge(1) != nil {
		t.Error("no bar became one")
	}
}

func testReport() *Report {
	r := &Report{Command: "cpu", Machine: Machine{CPU: "Z80", Cores: 2, Workers: 1, Kernels: "go", Go: "go1.26", Load: 0.25}}
	a := r.Row("Some", "8 heads", "ceiling")
	a.Add(Speed, 20, nil)
	b := r.Row("Some", "8 heads", "ours")
	b.Add(Speed, 18.04, nil)
	b.Add(Share, 0.902, AtLeast(0.9))
	b.Add(Allocs, 2, AtMost(0))
	r.Row("Some", "9 heads", "ceiling").Add(Speed, 21, nil)
	r.Row("Other", "", "ours").Add(OverTorch, 3.456, AtLeast(4))
	return r
}

func TestTables(t *testing.T) {
	r := testReport()
	var out bytes.Buffer
	r.WriteHead(&out)
	r.WriteTable(&out, "Some")
	r.WriteTable(&out, "Other")
	r.WriteVerdict(&out)
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
	new(Report).WriteVerdict(&out)
	if out.String() != "\nNone of these figures has a bar.\n" {
		t.Errorf("%q", out.String())
	}
}

func TestSave(t *testing.T) {
	r, name := testReport(), filepath.Join(t.TempDir(), "r.json")
	if err := r.Save(""); err != nil {
		t.Fatal(err)
	}
	if err := r.Save(name); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	back := new(Report)
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
