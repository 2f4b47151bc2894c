"""What is known of a language, by any code of it."""

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from langcodes import tag_is_valid
from langcodes.data_dicts import LIKELY_SUBTAGS
from sacrebleu.metrics import BLEU

from relpos_fairseq.metrics.answer_scores import normalise_mlqa
from relpos_fairseq.metrics.bleu import bleu_of
from relpos_fairseq.text.languages import find_language
from relpos_fairseq.text.moses import Detokeniser, FastMoses, Normaliser


@pytest.mark.parametrize(
    ("codes", "code", "scripts", "has_spaces", "scored_as"),
    [
        ("pt pt-BR pt_BR por por_Latn pt_BR.UTF-8", "pt", "Latn", True, "pt"),
        ("ru ru_RU rus_Cyrl ru-cyrl RU", "ru", "Cyrl", True, "ru"),
        ("zh zh_CN zh-TW zho_Hans zho_Hant cmn cmn_Hans zh-Hant-HK", "zh", "Hani", False, "zh"),
        ("yue yue_Hant", "yue", "Hani", False, "zh"),
        ("ja jpn jpn_Jpan ja_JP", "ja", "Hani Hira Kana", False, "ja"),
        ("ko kor ko_KR kor_Kore", "ko", "Hang Hani", True, "ko"),
        ("th tha_Thai", "th", "Thai", False, "th"),
        ("km lo_LA my bo", None, None, False, None),
        ("sr srp sr_RS", "sr", "Cyrl Latn", True, "sr"),
        ("sr-Latn srp_Latn sr-ME", "sr", "Latn", True, "sr"),
        ("sr-Cyrl srp_Cyrl", "sr", "Cyrl", True, "sr"),
        ("fr fr_FR@euro fr-Latf", "fr", "Latn", True, "fr"),
        ("xx klingon und zxx x a-b-c simple src tgt", None, "", True, None),
    ],
)
def test_a_language_by_its_codes(codes, code, scripts, has_spaces, scored_as) -> None:
    """Any code of a language says the same of it; what nobody assigned has no scripts."""
    for one in codes.split():
        found = find_language(one)
        assert found.code == (code or found.code), one
        assert scripts is None or found.scripts == tuple(scripts.split()), one
        assert found.has_spaces is has_spaces, one
        assert found.scored_as == (scored_as or found.code), one


LETTERS = dict(kk="Қазақстан", ta="தமிழ்", el="Ελλάδα", he="שלום", am="ሰላም", hy="Հայ", ja="カナ", zh="漢字", ko="한국")
LETTERS |= dict(ka="საქართველო", bn="বাংলা", ar="سلام", mn="Монгол", vi="Việt")


@pytest.mark.parametrize("code", LETTERS)
def test_text_of_a_language_has_its_letters(code: str) -> None:
    """Letters of a language are of its scripts, and letters of another are not."""
    letters = find_language(code).letters()
    assert all(letters.match(one) for one in LETTERS[code] if one.isalpha())
    other = "Ж" if code not in ("kk", "mn") else "Ω"
    assert not letters.match(other) and not letters.match("!") and not letters.match("7")


@given(st.one_of(st.text(max_size=12), st.sampled_from(sorted(LIKELY_SUBTAGS))))
def test_every_code_is_known_or_has_no_scripts(code: str) -> None:
    """No text ends in an error; scripts are such as Unicode's characters have; likely tags have some."""
    found = find_language(code)
    assert all(regex.compile(rf"\p{{Script={one}}}") for one in found.scripts)
    assert (found.letters() is None) == (not found.scripts)
    if code in LIKELY_SUBTAGS and not code.startswith("und") and tag_is_valid(code):
        assert found.scripts or LIKELY_SUBTAGS[code].split("-")[1] not in ("Latn", "Cyrl", "Arab", "Deva", "Hans")


def test_sacrebleu_knows_the_names_that_it_is_given() -> None:
    """Languages that sacrebleu cuts otherwise are scored under the names of its own table."""
    assert {find_language(code).scored_as for code in ("yue", "jpn_Jpan", "kor")} == set(BLEU._TOKENIZER_MAP)


@pytest.mark.parametrize("language", ["th", "km_KH", "lo", "mya_Mymr", "bo"])
def test_a_language_that_is_cut_at_spaces_it_has_not(language: str, caplog) -> None:
    """Sacrebleu has no tokenizer of these: the score is its default's, and said to mean little."""
    assert bleu_of(language, None, "--tokenize char").tokenizer_signature == "13a"
    assert f"BLEU cuts {language} by 13a, at spaces" in caplog.text and "--tokenize char" in caplog.text
    caplog.clear()
    bleu_of(language, "char", "")
    bleu_of("de", None, "")
    assert not caplog.text


def test_moses_rules_are_those_of_the_written_language() -> None:
    """Cantonese is cut as Chinese is, not into characters."""
    assert FastMoses("yue")("\u4f60\u597d") == FastMoses("zho_Hans")("\u4f60\u597d")


# Sentences with the marks of each script, parted by |; of languages that Moses' detokenizer gives back, and of others.
COME_BACK = {
    "en": 'The house, which is old, costs 3.5 million; he said: "No!"|He is not there (yet), is it well-known?',
    "de": 'Das Haus, das alt ist, kostet 3,5 Millionen.|Er sagte: "Nein!" und ging.',
    "fr": "L'homme n'est pas là, dit-il.|C'est aujourd'hui qu'il vient.",
    "it": "L'uomo è andato all'estero, dice.|Dov'è la casa?",
    "cs": 'Dům, který je starý, stojí tři miliony.|Řekl: "Ne!"',
    "vi": "Ngôi nhà này, rất cũ, có giá ba triệu.|Tôi đi đâu?",
    "tr": "Evet, geliyorum.|Nereye gidiyorsun?",
    "ru": 'Дом, который стар, стоит три миллиона.|Он сказал: "Нет!" и ушёл.',
    "kk": "Бұл үй ескі, бірақ әдемі.|Қайда барасың?",
    "sr_Cyrl": "Ова кућа је стара, али лепа.",
    "el": "Το σπίτι, που είναι παλιό, κοστίζει πολύ.|Πού πας;",
    "chr": "ᎣᏏᏲ, ᏙᎯᏧ?",
    "zgh": "ⵜⴰⵎⴰⵣⵉⵖⵜ, ⵜⴰⵎⴰⵜⴰⵢⵜ.",
}
STAY_CUT = {
    "th": "บ้านหลังนี้เก่าแต่สวยมาก|ที่นี่มีน้ำ",
    "lo": "ເຮືອນຫຼັງນີ້ເກົ່າ|ຢູ່ນີ້ມີນ້ຳ",
    "km": "ផ្ទះនេះចាស់ណាស់។|ប្រទេសកម្ពុជា",
    "my": "ဒီအိမ်က ဟောင်းတယ်။|မြန်မာနိုင်ငံ",
    "bo": "ཁང་པ་འདི་རྙིང་པ་རེད།|བོད་སྐད་ཡིག",
    "zh": "这座房子很旧，但是很漂亮。",
    "yue": "呢間屋好舊，不過好靚。",
    "ja": "この家は古いが、きれいだ。|どこへ行きますか？",
    "ko": '그는 "아니요"라고 말했다.',
    "hy": "Տունը, որ հին է, թանկ է։",
    "he": 'צה"ל הודיע.',
    "ar": "البيت، وهو قديم، غالي الثمن.|أين تذهب؟",
    "fa": "می\u200cروم.",
    "ur": "یہ گھر پرانا ہے، مہنگا ہے۔",
    "hi": "यह घर, जो पुराना है, महँगा है।",
    "bn": "বিদ্যালয়ে যাই।",
    "pa": "ਪੰਜਾਬ ਵਿੱਚ।",
    "ne": "यो घर पुरानो छ।",
    "si": "ශ්\u200dරී ලංකාව.",
    "am": "እሱ፣ አይደለም አለ።",
    "mn_Mong": "ᠮᠣᠩᠭᠣᠯ ᠬᠡᠯᠡ᠃",
}


@pytest.mark.parametrize("language", [*COME_BACK, *STAY_CUT])
def test_moses_is_the_default_of_languages_that_it_gives_back(language: str) -> None:
    """Tokenized and detokenized, what normalization left comes back; no other language is cut by default."""
    normal = list(map(Normaliser(language), (COME_BACK | STAY_CUT)[language].split("|")))
    back = list(map(Detokeniser(language, "moses"), map(FastMoses(language), normal)))
    assert find_language(language).comes_back_from_moses == (back == normal) == (language in COME_BACK)


@pytest.mark.nightly
def test_the_scripts_that_moses_gives_back() -> None:
    """All others of CLDR's languages have marks of their own, or no spaces; an unknown language is Latin's."""
    languages = [one for one in LIKELY_SUBTAGS if "-" not in one]
    kept = {script for one in map(find_language, languages) if one.comes_back_from_moses for script in one.likely}
    assert kept >= {"Latn", "Cyrl", "Grek", "Cher", "Tfng"}
    assert not kept & {"Taml", "Telu", "Knda", "Mlym", "Gujr", "Orya", "Laoo", "Java", "Thaa", "Syrc", "Hani", "Hang"}
    assert find_language("xx").comes_back_from_moses


def test_answers_in_a_language_by_any_code() -> None:
    """MLQA's normalisation is that of the language, however its code is spelt."""
    assert normalise_mlqa("Das Haus", "de_DE") == normalise_mlqa("Das Haus", "de") == "haus"
    assert normalise_mlqa("中文", "zho_Hans") == "中 文"
    with pytest.raises(ValueError, match="not 'fr'"):
        normalise_mlqa("la maison", "fr")
