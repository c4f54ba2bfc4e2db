package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// TestCommitted: the figure that the documentation shows is what the schedules
// are now.
func TestCommitted(t *testing.T) {
	got, err := os.ReadFile("../../docs/schedule.svg")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, drawSchedules()) {
		t.Error("docs/schedule.svg is out of date: in cmd/leanbench, go run . figure -o ../../docs/schedule.svg")
	}
}

// TestDrawing: the SVG is well-formed, nothing is drawn outside it, and each
// panel has every LeanTile once.
func TestDrawing(t *testing.T) {
	d := xml.NewDecoder(bytes.NewReader(drawSchedules()))
	tiles := 0 // width of all bars, in LeanTiles
	var texts []string
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if text, ok := token.(xml.CharData); ok {
			texts = append(texts, string(text))
		}
		e, ok := token.(xml.StartElement)
		if !ok {
			continue
		}
		attr := make(map[string]string)
		for _, a := range e.Attr {
			attr[a.Name.Local] = a.Value
		}
		number := func(name string) float64 {
			if attr[name] == "" {
				return 0
			}
			v, err := strconv.ParseFloat(attr[name], 64)
			if err != nil {
				t.Errorf("%s %s: %v", e.Name.Local, name, err)
			}
			return v
		}
		switch e.Name.Local {
		case "rect", "text", "circle":
			x, y := number("x")+number("cx"), number("y")+number("cy")
			if x < 0 || y < 0 || x+number("width") > width || y+number("height") > height {
				t.Errorf("%s at (%v, %v) is not inside the figure", e.Name.Local, x, y)
			}
			switch name, _, _ := strings.Cut(attr["class"], " "); name {
			case "A", "B", "C":
				if e.Name.Local == "rect" {
					tiles += int(number("width")+2) / tileW
				}
			}
		}
	}
	if want := 4*15 + 2; tiles != want { // the strip, three panels, two bars in the legend
		t.Errorf("bars of %d LeanTiles, want %d", tiles, want)
	}
	all := strings.Join(texts, "\n")
	for _, want := range []string{
		"10 LeanTiles long, 30% busy", "5 LeanTiles long, 60% busy", "3 LeanTiles long, 100% busy",
	} {
		if !strings.Contains(all, want) {
			t.Errorf("the figure does not say %q", want)
		}
	}
}

func TestRun(t *testing.T) {
	file := filepath.Join(t.TempDir(), "s.svg")
	svg := string(drawSchedules())
	for _, c := range []struct {
		args           []string
		status         int
		stdout, stderr string // what each holds a part of; empty: nothing is printed
	}{
		{nil, 2, "", "usage: leanbench"},
		{[]string{"help"}, 0, "figure", ""},
		{[]string{"plot"}, 2, "", `unknown command "plot"`},
		{[]string{"figure", "-x"}, 2, "", "-x"},
		{[]string{"figure", "-h"}, 0, "", "-o"},
		{[]string{"figure", "here.svg"}, 2, "", `unexpected argument "here.svg"`},
		{[]string{"cpu", "-workers", "0"}, 1, "", "leanbench cpu: 0 workers on "},
		{[]string{"peers"}, 1, "", "-python is needed"},
		{[]string{"peers", "-python", "/no/such/python", "-workers", "1"}, 1, "", "/no/such/python"},
		{[]string{"e2e"}, 1, "", "-python is needed"},
		{[]string{"checkpoint", "-shape", "9t"}, 1, "", `"9t" is none of 1.3b, 125m,`},
		{[]string{"checkpoint", "-dtype", "f8"}, 1, "", `"f8" is none of f32, f16, bf16`},
		{[]string{"checkpoint"}, 1, "", "-o is needed"},
		{[]string{"figure"}, 0, svg, ""},
		{[]string{"figure", "-o", file}, 0, "", ""},
		{[]string{"figure", "-o", filepath.Join(file, "no")}, 1, "", "leanbench figure: open"},
	} {
		var stdout, stderr bytes.Buffer
		status := run(c.args, &stdout, &stderr)
		if status != c.status || !holds(stdout.String(), c.stdout) || !holds(stderr.String(), c.stderr) {
			t.Errorf("%q: status %d, want %d; stdout %.80q, stderr %.80q", c.args, status, c.status, stdout.String(), stderr.String())
		}
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != svg {
		t.Errorf("-o wrote %d bytes (%v), want %d", len(got), err, len(svg))
	}
}

func holds(s, part string) bool {
	return (s == "") == (part == "") && strings.Contains(s, part)
}
