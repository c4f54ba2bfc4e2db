package chat

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// conversation is an entry of testdata/conversations.json.
type conversation struct {
	Name                string
	Messages            []Message
	Tools               string
	AddGenerationPrompt bool `json:"add_generation_prompt"`
	Variables           map[string]any
}

func load(t *testing.T, path string, to any) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(data, to)
	}
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

var clock = time.Date(2026, 11, 8, 4, 5, 6, 0, time.UTC)

// compare renders the templates of a folder and compares the texts with the golden file of compare.py.
func compare(t *testing.T, folder, golden string) (none int) {
	var conversations []conversation
	var tools []json.RawMessage
	var texts map[string]map[string]*string
	load(t, "testdata/conversations.json", &conversations)
	load(t, "testdata/tools.json", &tools)
	load(t, golden, &texts)
	files, err := filepath.Glob(filepath.Join(folder, "*.jinja"))
	if err != nil || len(files) == 0 || len(files) != len(texts) {
		t.Fatalf("%d templates, %d golden ones: %v", len(files), len(texts), err)
	}
	equal, refused, whole, tool, toolEqual := 0, 0, 0, 0, 0
	for _, file := range files {
		src, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		name := filepath.Base(file)
		opts := Options{Tokens: map[string]string{"bos_token": "<s>", "eos_token": "</s>"}, Now: func() time.Time { return clock }}
		templates, compileErr := New(map[string]string{"default": string(src)}, opts)
		all, some := true, false
		for _, c := range conversations {
			want, ok := texts[name][c.Name]
			if !ok {
				t.Fatalf("%s: conversation %q is not in %s: run compare.py again", name, c.Name, golden)
			}
			in := Conversation{Messages: c.Messages, AddGenerationPrompt: c.AddGenerationPrompt, Variables: c.Variables}
			switch c.Tools {
			case "all":
				in.Tools = tools
			case "two": // tools whose arguments have one type each
				in.Tools = tools[:2]
			}
			got, err := "", compileErr
			if err == nil {
				got, err = templates.Render(in)
			}
			switch {
			case want == nil && err == nil:
				t.Errorf("%s, %s: rendered, and Python refuses it:\n%q", name, c.Name, got)
				all = false
			case want == nil:
				refused++
				if !strings.Contains(err.Error(), "line ") || errors.Is(err, ErrLimit) && !strings.Contains(err.Error(), "calls inside") {
					t.Errorf("%s, %s: refused without a place: %v", name, c.Name, err)
				}
			case err != nil:
				t.Errorf("%s, %s: %v", name, c.Name, err)
				all, some = false, true
			case got != *want:
				i := 0
				for i < min(len(got), len(*want)) && got[i] == (*want)[i] {
					i++
				}
				t.Errorf("%s, %s: at byte %d got %.80q, want %.80q", name, c.Name, i, got[i:], (*want)[i:])
				all, some = false, true
			default:
				equal++
				some = true
			}
			if want != nil && in.Tools != nil {
				tool++
				if err == nil && got == *want {
					toolEqual++
				}
			}
		}
		if all && some {
			whole++
		}
		if !some {
			none++
		}
	}
	t.Logf("%d templates: %d equal for every conversation that Python renders, %d for which Python renders none; %d texts equal, %d refused by both; with tools %d of %d texts equal",
		len(files), whole, none, equal, refused, toolEqual, tool)
	return none
}

// TestFolder compares the templates of a folder with the golden file of testdata/compare.py.
func TestFolder(t *testing.T) {
	folder, golden := os.Getenv("LEAN_CHAT_TEMPLATES"), os.Getenv("LEAN_CHAT_GOLDEN")
	if folder == "" || golden == "" {
		t.Skip("LEAN_CHAT_TEMPLATES and LEAN_CHAT_GOLDEN name no templates: see testdata/compare.py")
	}
	compare(t, folder, golden)
}

// TestGolden compares the templates of testdata with the golden file.
func TestGolden(t *testing.T) {
	if none := compare(t, "testdata/templates", "testdata/golden.json"); none > 0 {
		t.Errorf("%d templates render for no conversation, and test nothing", none)
	}
}
