package figure

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"strconv"
	"strings"
	"testing"
)

// TestCommitted: the figure that the documentation shows is what the schedules
// are now.
func TestCommitted(t *testing.T) {
	got, err := os.ReadFile("../../../docs/schedule.svg")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, Schedules()) {
		t.Error("docs/schedule.svg is out of date: in cmd/leanbench, go run . figure -o ../../docs/schedule.svg")
	}
}

// TestDrawing: the SVG is well-formed, nothing is drawn outside it, and each
// panel has every LeanTile once.
func TestDrawing(t *testing.T) {
	d := xml.NewDecoder(bytes.NewReader(Schedules()))
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
