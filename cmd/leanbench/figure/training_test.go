package figure

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
)

const trainingText = "testdata/train.txt"

// TestTrainingCommitted: docs/train.svg is the drawing of the committed output of examples/train.
func TestTrainingCommitted(t *testing.T) {
	text, err := os.ReadFile(trainingText)
	if err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile("../../../docs/train.svg")
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := parseTraining(text)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, parsed.draw()) {
		t.Error("docs/train.svg is out of date: in cmd/leanbench, go run . training -from figure/testdata/train.txt -o ../../docs/train.svg")
	}
}

// TestTrainingDrawing: the SVG is well-formed, and has a line of each attention in both diagrams, with a point for each row.
func TestTrainingDrawing(t *testing.T) {
	parsed, err := parseTraining([]byte("loss\nstep default lean\n1 4 4\n11 2.5 2.5\n ms 3 3 a step\n\ncontext default lean\n128 7.5 3\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		"line wide default": "M93.3 106.0L366.0 166.0", "line lean": "M93.3 106.0L366.0 166.0M752.0 206.0", "line default": "M752.0 116.0",
	}
	got := map[string]string{}
	for d := xml.NewDecoder(bytes.NewReader(parsed.draw())); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		e, ok := token.(xml.StartElement)
		if !ok || e.Name.Local != "path" || !strings.HasPrefix(e.Attr[0].Value, "line") {
			continue
		}
		got[e.Attr[0].Value] += e.Attr[1].Value
	}
	if len(got) != len(want) {
		t.Errorf("lines %q, want %q", got, want)
	}
	for class, path := range want {
		if got[class] != path {
			t.Errorf("%s: %q, want %q", class, got[class], path)
		}
	}
}

// TestTrainingRefused: what is not the output of examples/train is an error that names the line.
func TestTrainingRefused(t *testing.T) {
	const good = "step default lean\n1 4 4\ncontext default lean\n128 7.5 3\n"
	if _, err := parseTraining([]byte(good)); err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]string{
		"":                                     "0 rows of losses and 0 of memory",
		"step default lean\n1 4 4\n":           "1 rows of losses and 0 of memory",
		"step lean\n1 4\n":                     "0 rows of losses",
		good + "256 7":                         `line 5, "256 7"`,
		good + "256 7 8 9":                     "line 5",
		good + "256 NaN 8":                     "line 5",
		good + "256 7 x":                       "line 5",
		good + "256 7 1e300":                   "line 5",
		good + "-1 7 8":                        "line 5",
		good + "128 7 8":                       "line 5",
		"step default lean\n0 4 4\n":           "line 2",
		good + strings.Repeat("x", 1<<20):      "token too long",
		good + "256 7 " + string([]byte{0, 7}): `"256 7 \x00\a"`,
	} {
		if _, err := parseTraining([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80q: %v, want %s", text, err, want)
		}
	}
}
